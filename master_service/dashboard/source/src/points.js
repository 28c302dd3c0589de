/** `points` with those of `tail`, which begins at or after the last of them, in place of what both have. */
export function joined(points, tail) {
  if (tail.length === 0) return points;
  const first = tail[0].step;
  let keep = points.length;
  while (keep > 0 && points[keep - 1].step >= first) keep--;
  return [...points.slice(0, keep), ...tail];
}
