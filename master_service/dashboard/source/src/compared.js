// The address of a page that compares jobs: #/compare/NAME/NAME
export const MOST = 10;
export const ENDED = ["COMPLETED", "FAILED", "CANCELLED"];

export const addressOf = (names) => ["#", "compare", ...names.slice(0, MOST).map(encodeURIComponent)].join("/");

/** The jobs that an address names, each once; null: it is another page's. */
export function namesOf(hash) {
  const [, place, ...names] = hash.split("/");
  if (place !== "compare") return null;
  return [...new Set(names.filter(Boolean).map(decodeURIComponent))].slice(0, MOST);
}
