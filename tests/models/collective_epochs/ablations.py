"""Rules of the protocol, each of which can be switched off: the model must then break a promise."""

from __future__ import annotations

ABLATIONS = {
    "kept-means": "a member keeps the mean gradients of its own share alone",
    "statements": "each member goes on from the version that it has itself",
    "fence-before-statement": "a version that a member states before it has read the generation counts",
    "made-of": "versions of one number are taken for the same, also if a step was made again with other "
    "records",
    "stated-as-kept": "a member says of its newest version alone what it is made of, although it gives older "
    "ones, too",
    "given-by-joiners": "whoever has the newest version is asked for its means, also if it joined at that "
    "version and has none",
    "ids-never-repeat": "a new master counts generations on from a number that was used",
    "verdict-before-rebuild": "a member that finds another one silent makes the next generation for itself",
    "generation-fence": "pushes of generations that are over are taken, and what they brought is kept",
    "pulls-thrown-away": "means that were asked for in a generation that is over count",
    "steps-made-again": "what was acknowledged in a generation that is over is not pushed again",
}
