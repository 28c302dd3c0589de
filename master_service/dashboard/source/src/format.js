// Numbers and times as people read them.
const INTEGER = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const SHORT = new Intl.NumberFormat("en", { maximumSignificantDigits: 4 });

export const integer = (value) => (value == null ? "–" : INTEGER.format(value));

export function number(value) {
  if (value == null) return "–";
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(2) : SHORT.format(value);
}

/** 3 h 20 min, 4 min 10 s, 2.5 s */
export function duration(seconds) {
  if (seconds == null) return "–";
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  const whole = Math.round(seconds);
  const parts = [[Math.floor(whole / 86400), "d"], [Math.floor(whole / 3600) % 24, "h"], [Math.floor(whole / 60) % 60, "min"], [whole % 60, "s"]];
  const first = parts.findIndex(([count]) => count > 0);
  return parts.slice(first, first + 2).filter(([count]) => count > 0).map(([count, unit]) => `${count} ${unit}`).join(" ");
}

export function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let place = 0;
  while (count >= 1024 && place < units.length - 1) { count /= 1024; place++; }
  return `${SHORT.format(count)} ${units[place]}`;
}

const CLOCK = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const DAY = new Intl.DateTimeFormat("en-CA", { year: "numeric", month: "2-digit", day: "2-digit" });

/** 14:05:09, with the day before it if that is another one. */
export function time(text) {
  if (!text) return "–";
  const then = new Date(text);
  if (Number.isNaN(then.getTime())) return text;
  const day = DAY.format(then);
  return (day === DAY.format(new Date()) ? "" : `${day} `) + CLOCK.format(then);
}
