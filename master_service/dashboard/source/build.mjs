// Writes the dashboard's files: `node build.mjs [FOLDER]` (default: ../built). The same sources and packages give the same bytes.
import { mkdir, readFile, rm, writeFile } from "node:fs/promises";
import { createHash } from "node:crypto";
import { fileURLToPath } from "node:url";
import path from "node:path";
import { build } from "esbuild";
import { compile, compileModule } from "svelte/compiler";

const here = path.dirname(fileURLToPath(import.meta.url));
const out = path.resolve(process.argv[2] ?? path.join(here, "..", "built"));

/** Svelte's compiler as a plugin of esbuild. No name of a folder comes into the files. */
const svelte = {
  name: "svelte",
  setup(of) {
    const styles = new Map();
    const cssHash = ({ css }) => "s" + createHash("sha256").update(css).digest("hex").slice(0, 7);
    of.onLoad({ filter: /\.svelte$/ }, async ({ path: file }) => {
      const filename = path.relative(here, file);
      const made = compile(await readFile(file, "utf8"), { filename, generate: "client", css: "external", dev: false, cssHash });
      refuse(made.warnings);
      styles.set(file, made.css?.code ?? "");
      return { contents: `${made.js.code}\nimport ${JSON.stringify(`${file}.css`)};`, loader: "js" };
    });
    of.onLoad({ filter: /\.svelte\.js$/ }, async ({ path: file }) => {
      const made = compileModule(await readFile(file, "utf8"), { filename: path.relative(here, file), generate: "client", dev: false });
      refuse(made.warnings);
      return { contents: made.js.code, loader: "js" };
    });
    of.onResolve({ filter: /\.svelte\.css$/ }, ({ path: file }) => ({ path: file, namespace: "style" }));
    of.onLoad({ filter: /.*/, namespace: "style" }, ({ path: file }) => ({ contents: styles.get(file.slice(0, -".css".length)), loader: "css" }));
  },
};

function refuse(warnings) {
  if (warnings.length > 0) throw new Error(warnings.map((each) => `${each.filename}: ${each.code}: ${each.message}`).join("\n"));
}

const built = await build({
  absWorkingDir: here,
  entryPoints: { app: "src/main.js" },
  outdir: out,
  bundle: true,
  minify: true,
  format: "esm",
  target: ["chrome116", "firefox124", "safari17.4"],
  conditions: ["browser", "production"],
  legalComments: "none", // the licences are in a file of their own
  charset: "utf8",
  plugins: [svelte],
  write: false,
  logLevel: "error",
});
const licences = [];
for (const [name, file] of [["svelte", "LICENSE.md"], ["uplot", "LICENSE"]]) {
  const text = await readFile(path.join(here, "node_modules", name, file), "utf8");
  licences.push(`${name}\n\n${text.trim()}\n`);
}
await rm(out, { recursive: true, force: true });
await mkdir(out, { recursive: true });
for (const file of built.outputFiles) await writeFile(path.join(out, path.basename(file.path)), file.contents);
await writeFile(path.join(out, "index.html"), await readFile(path.join(here, "index.html")));
await writeFile(path.join(out, "LICENSES.txt"), `In app.js and app.css:\n\n${licences.join("\n")}`);
