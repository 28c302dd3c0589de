// What a chart draws, from the points of one or several jobs.

/** Steps over which a chart may be smoothed; 0: as reported. */
const WINDOWS = [0, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000];
const FLAT = 5; // a chart is flattened if all of its values take so many times the height of the middle 96 %
const TAIL = 0.02;
const FEWEST = 20; // with fewer points than these nothing is an outlier
export const HUES = 5; // colours of curves; those beyond are dashed

/** The windows that are of use for so many steps. */
export const windowsOf = (steps) => WINDOWS.filter((each) => each <= Math.max(2, steps / 4));

/** An exponential moving average over `window` steps: a value weighs (window - 1) / (window + 1) of the one a step later. Points that
 * stand for several steps weigh as much as these do, so that a curve is as smooth whether it is drawn of 100 points or of 10,000; the
 * first values are not drawn towards 0. */
export function smoothed(points, window) {
  if (!window) return points.map((each) => each.mean);
  const decay = (window - 1) / (window + 1);
  let sum = 0;
  let weight = 0;
  let before = null;
  return points.map((each) => {
    const width = each.last_step - each.step + 1;
    const fade = before === null ? 0 : decay ** Math.max(1, each.last_step - before);
    const own = decay === 0 ? 1 : (1 - decay ** width) / (1 - decay);
    before = each.last_step;
    sum = sum * fade + each.mean * own;
    weight = weight * fade + own;
    return sum / weight;
  });
}

/** Where a chart ends if a few values would flatten the others: {low, high, outside}; null: all of them are shown. `least` and `most`: of
 * each point. Half the height of the middle 96 % is kept above and below. */
export function robustRange(least, most) {
  if (most.length < FEWEST) return null;
  const [lows, highs] = [Float64Array.from(least).sort(), Float64Array.from(most).sort()];
  const last = lows.length - 1;
  const [bottom, top] = [lows[Math.floor(TAIL * last)], highs[Math.ceil((1 - TAIL) * last)]];
  const reach = top - bottom;
  if (!(reach > 0) || highs[last] - lows[0] <= FLAT * reach) return null;
  const [low, high] = [Math.max(lows[0], bottom - reach / 2), Math.min(highs[last], top + reach / 2)];
  let outside = 0;
  for (let i = 0; i <= last; i++) if (least[i] < low || most[i] > high) outside++;
  return { low, high, outside };
}

/** One column of steps, and of each curve ([steps, values]) the values at these; undefined where it has none. */
export function aligned(curves) {
  if (curves.length === 1) return [...curves[0]];
  const steps = [...new Set(curves.flatMap(([own]) => own))].sort((a, b) => a - b);
  const place = new Map(steps.map((step, index) => [step, index]));
  return [steps, ...curves.map(([own, values]) => {
    const column = new Array(steps.length).fill(undefined);
    own.forEach((step, index) => (column[place.get(step)] = values[index]));
    return column;
  })];
}

/** What a metric counts, for the axis. */
export function unitOf(metric) {
  if (metric.startsWith("time.")) return "share of a step's time";
  if (/^lr(\.\d+)?$/.test(metric)) return "learning rate";
  return { records_per_second: "records per second", grad_norm: "norm of the gradient", nonfinite: "minibatches that were not finite" }[metric] ?? metric;
}
