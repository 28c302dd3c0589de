// Whether the page is just being printed: charts are drawn for paper then, in the colours of the light scheme.
import { flushSync } from "svelte";

export const WIDTH = 640; // of a chart, in CSS pixels: A4 and Letter have room for it
export const paper = $state({ on: false });

addEventListener("beforeprint", () => turn(true));
addEventListener("afterprint", () => turn(false));

function turn(on) {
  document.documentElement.toggleAttribute("data-paper", on);
  flushSync(() => (paper.on = on));
}
