"""Real etcds with flags of their own, for tests: members of a cluster, TLS with certificates made by
openssl."""

from __future__ import annotations

import asyncio
import subprocess
from contextlib import asynccontextmanager
from pathlib import Path

from trireme_shared.platform.etcd.embedded import find_binary, free_ports
from trireme_shared.platform.runtime.process_setup import die_with_parent


@asynccontextmanager
async def etcd_process(
    folder: Path, name: str, url: str, peer: str, cluster: str, *flags: str, progress_s: int | None = 1
):
    """`progress_s`: how often it notifies of progress, None: as seldom as by default."""
    progress = ("--experimental-watch-progress-notify-interval", f"{progress_s}s") if progress_s else ()
    with (folder / f"{name}.log").open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *(str(find_binary()), "--name", name, "--data-dir", str(folder / f"{name}.data")),
            *("--listen-client-urls", url, "--advertise-client-urls", url),
            *(
                "--listen-peer-urls",
                peer,
                "--initial-advertise-peer-urls",
                peer,
                "--initial-cluster",
                cluster,
            ),
            *("--log-level", "error", *progress, *flags),
            stdout=output,
            stderr=output,
            preexec_fn=die_with_parent(),
        )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True, timeout=20)


def make_certificates(folder: Path) -> None:
    """ca.pem, server.pem (for 127.0.0.1), wrong.pem (for another host), client.pem (no CommonName)."""
    ec = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl(
        folder,
        "req",
        "-x509",
        *ec,
        "-keyout",
        "ca.key",
        "-out",
        "ca.pem",
        "-days",
        "2",
        "-subj",
        "/CN=test-ca",
    )
    for name, host in (("server", "IP:127.0.0.1"), ("wrong", "DNS:elsewhere"), ("client", "DNS:client")):
        subject = "/O=client" if name == "client" else f"/CN={name}"
        openssl(folder, "req", *ec, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", subject)
        (folder / f"{name}.ext").write_text(
            f"subjectAltName={host}\nextendedKeyUsage=serverAuth,clientAuth\n"
        )
        openssl(
            folder,
            *("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial"),
            *("-out", f"{name}.pem", "-days", "2", "-extfile", f"{name}.ext"),
        )


@asynccontextmanager
async def tls_etcd(folder: Path, certificate: str):
    client_port, peer_port = free_ports(2)
    url, peer = f"https://127.0.0.1:{client_port}", f"http://127.0.0.1:{peer_port}"
    flags = (
        *(
            "--cert-file",
            str(folder / f"{certificate}.pem"),
            "--key-file",
            str(folder / f"{certificate}.key"),
        ),
        *("--client-cert-auth", "--trusted-ca-file", str(folder / "ca.pem")),
    )
    async with etcd_process(folder, certificate, url, peer, f"{certificate}={peer}", *flags) as process:
        yield url, process
