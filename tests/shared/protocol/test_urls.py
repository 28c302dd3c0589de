"""Paths and URLs with passwords: whole where they are used, without them in sentences, logs and errors."""

from __future__ import annotations

import json
from typing import Any

import pytest

from trireme.cli.exit_codes import report_error
from trireme_shared.platform.runtime import telemetry
from trireme_shared.platform.storage import files
from trireme_shared.protocol.errors import InvalidArgument
from trireme_shared.protocol.records import JobSpec
from trireme_shared.protocol.urls import Url, without_passwords

PASSWORD = "pa55word"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"sftp://me:{PASSWORD}@host/a", "sftp://***@host/a"),
        (f"sftp://{PASSWORD}@host/a", "sftp://***@host/a"),
        (f"sftp://me:pa@55{PASSWORD}@host/a", "sftp://***@host/a"),
        (f"simplecache::http://me:{PASSWORD}@host/a", "simplecache::http://***@host/a"),
        (
            f"https://h/a?X-Amz-Signature={PASSWORD}&X-Amz-Date=1",
            "https://h/a?X-Amz-Signature=***&X-Amz-Date=1",
        ),
        (f"https://h/a?sv=2&sig={PASSWORD}", "https://h/a?sv=2&sig=***"),
        (f"https://h/a?access_token={PASSWORD}#end", "https://h/a?access_token=***#end"),
        (f'{{"a":"s3://u:{PASSWORD}@b","c":"d@e"}}', '{"a":"s3://***@b","c":"d@e"}'),
        (json.dumps(f"no http://h\nmail me@h, ftp://u:{PASSWORD}@h\n"),
         json.dumps("no http://h\nmail me@h, ftp://***@h\n")),
        ("/data/a@b?token=1", "/data/a@b?token=1"),
        ("https://h/a?page_size=5&after=1", "https://h/a?page_size=5&after=1"),
    ],
)  # fmt: skip
def test_passwords_of_urls_are_left_out_of_any_text(text: str, shown: str) -> None:
    assert without_passwords(text) == shown
    assert telemetry.hidden(text) == shown


def spec_with_passwords(**values: Any) -> JobSpec:
    place = f"sftp://me:{PASSWORD}@host"
    return JobSpec.model_validate(
        {
            "job": "a",
            "script": f"{place}/train.py",
            "storage": f"{place}/jobs",
            "dataset": {"kind": "text_lines", "urls": [f"{place}/train.txt"]},
            "evaluation_dataset": {"kind": "image_folder", "urls": [f"{place}/images"]},
            "init_from": f"{place}/first.safetensors",
            "trackers": [{"kind": "mlflow", "uri": f"https://h/?access_token={PASSWORD}"}],
            **values,
        }
    )


def test_a_spec_has_its_urls_whole_and_no_sentence_about_it_has_a_password() -> None:
    spec = spec_with_passwords()
    assert PASSWORD not in repr(spec)
    assert spec.init_from is not None
    urls = [spec.script, spec.storage, *spec.dataset.urls, spec.init_from, spec.trackers[0].uri]
    assert spec.evaluation_dataset is not None
    urls += spec.evaluation_dataset.urls
    for url in urls:
        assert PASSWORD in url
        assert PASSWORD not in f"{url} cannot be read" + f"{url!r} cannot be read" + f"{url:>60}"
    assert JobSpec.model_validate_json(spec.to_bytes()) == spec
    assert spec.to_bytes().count(PASSWORD.encode()) == len(urls)
    assert files.join(spec.storage, "checkpoints") == f"sftp://me:{PASSWORD}@host/jobs/checkpoints"


def test_a_file_is_opened_by_the_whole_url(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def url_to_fs(url: str) -> tuple[object, str]:
        asked.append(f"{url}")
        return object(), url

    monkeypatch.setattr("fsspec.core.url_to_fs", url_to_fs)
    files.local_path(Url(f"sftp://me:{PASSWORD}@host/a"))
    assert asked == [f"sftp://me:{PASSWORD}@host/a"]


def test_logs_and_errors_on_the_command_line_have_no_password(capsys: pytest.CaptureFixture[str]) -> None:
    error = InvalidArgument(f"sftp://me:{PASSWORD}@host/a cannot be read", hint=f"ftp://u:{PASSWORD}@h")
    for json_lines in (True, False):
        telemetry.configure(json=json_lines)
        log = telemetry.logger("a")
        log.info("opened", url=f"sftp://me:{PASSWORD}@host/a", cause=error.message)
        try:
            raise error
        except InvalidArgument:
            log.exception("failed")
    report_error(error, as_json=True)
    told = capsys.readouterr()
    assert PASSWORD not in told.out + told.err
    assert told.err.count("sftp://***@host/a") >= 6
    assert json.loads(told.out)["error"]["message"] == "sftp://***@host/a cannot be read"
