"""The page at `/`: the files that `source/` is built into, and the headers they are served with.

source/ (Svelte, uPlot) ── make dashboard ──► built/ ── GET /, /dashboard/...
    ──► a browser, which asks the REST API like any other client
"""

from __future__ import annotations

from pathlib import Path

BUILT = Path(__file__).parent / "built"
FILES = {
    "/": (BUILT / "index.html", "text/html; charset=utf-8"),
    "/dashboard/app.js": (BUILT / "app.js", "text/javascript; charset=utf-8"),
    "/dashboard/app.css": (BUILT / "app.css", "text/css; charset=utf-8"),
    "/dashboard/licenses": (BUILT / "LICENSES.txt", "text/plain; charset=utf-8"),
}
# Scripts and styles come from files of this service only, text never becomes HTML but in Svelte's own
# templates, no page may frame it, and nothing is sent elsewhere.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; connect-src 'self'; "
    "base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types "
    "svelte-trusted-html"
)
