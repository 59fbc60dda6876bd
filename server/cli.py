"""The command `ringfence`: serve, check, status. Every configuration key is an option of serve and check."""

import dataclasses
import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from native.binary import DecoderMissing
from server import keys, logs, serving
from server.badrequest import BadRequest
from server.check import findings
from server.config import KEYS, PREFIX, Config, ConfigError, load_config
from server.demo import DemoError, demo_model_path
from server.fleet import pool_settings
from server.report import describe_status, table
from server.tokenizer import Tokenizer, TokenizerError
from workers.devices import find_devices

_OPERATOR_ERRORS = (ConfigError, DecoderMissing, DemoError, TokenizerError, serving.BindError, BadRequest)
STATUS_TIMEOUT_S = 10.0


def configured(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --config and an option for each key. The command gets the checked Config."""

    def call(config: str | None, **options: object) -> None:
        given = {name: value for name, value in options.items() if value is not None}
        path = config or os.environ.get(PREFIX + "CONFIG")
        try:
            checked = load_config(options=given, environment=os.environ, path=Path(path) if path else None)
            command(_with_demo(checked))
        except _OPERATOR_ERRORS as error:
            raise click.ClickException(str(error)) from None

    call.__name__, call.__doc__ = command.__name__, command.__doc__
    for name, item in reversed(KEYS.items()):
        call = _option(name, item)(call)
    return click.option("--config", metavar="FILE", help="TOML file with any of these keys.")(call)


def _option(name: str, item: "dataclasses.Field[Any]") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    flag = "--" + name.replace("_", "-")
    text = item.metadata["help"]
    if item.metadata["parser"] is keys.boolean:
        return click.option(f"{flag}/--no-{flag[2:]}", name, default=None, help=text)
    default = "" if item.default in ((), "", None) else f" [{_shown(item)}]"
    return click.option(flag, name, metavar=item.metadata["metavar"], help=text + default)


def _shown(item: "dataclasses.Field[Any]") -> str:
    default: Any = item.default
    parser = item.metadata["parser"]
    if parser is keys.workers:
        return "auto"
    if parser is keys.size and default and default % 1024 == 0:
        mebibytes, rest = divmod(default, 1 << 20)
        return f"{default >> 10}KiB" if rest else f"{mebibytes}MiB"
    return f"{default:g}" if isinstance(default, float) else str(default)


def _with_demo(config: Config) -> Config:
    """The demo model's path in its place, assembled first if need be."""
    if not config.demo:
        return config
    path = str(demo_model_path(_show_progress))
    if config.decoder_command:
        return dataclasses.replace(config, tokenizer=config.tokenizer or path)
    return dataclasses.replace(config, model=path)


def _show_progress(done: int, total: int) -> None:
    if sys.stderr.isatty():
        click.echo(f"\rdemo model: {done * 100 // total} %", err=True, nl=done == total)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
def main() -> None:
    """An OpenAI-compatible server for token decoders, with one worker process for each."""


@main.command()
@configured
def serve(config: Config) -> None:
    """Serve a model until SIGTERM or SIGINT."""
    from workers.pool import Pool

    logs.configure(level=config.log_level, style=config.log_format)
    serving.raise_file_limit(config.connection_limit)
    listener = serving.bind(config.host, config.port)
    tokenizer = Tokenizer.load(Path(config.tokenizer_path).expanduser())
    settings = pool_settings(config, find_devices(), end_ids=tokenizer.eog)
    code = serving.run(config, lambda: Pool(settings), tokenizer, listener)
    if code:
        sys.exit(code)


@main.command()
@configured
def check(config: Config) -> None:
    """Look for what would keep `serve` from serving."""
    rows = [("", "", "")]
    is_good = True
    for finding in findings(config, find_devices()):
        is_good &= finding.is_good
        rows.append(("ok" if finding.is_good else "FAILED", finding.subject, finding.detail))
    click.echo(table(rows[1:]))
    if not is_good:
        sys.exit(1)


@main.command()
@click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="The server's address.")
@click.option("--api-key", envvar=PREFIX + "API_KEY", help="A key of the server, if it wants one.")
@click.option("--json", "as_json", is_flag=True, help="The whole of /status as JSON.")
def status(url: str, api_key: str | None, as_json: bool) -> None:
    """Show what a running server and its workers do. Exits with 1 while it can't serve."""
    answer = _fetch(url.rstrip("/") + "/status", (api_key or "").split(",")[0])
    click.echo(json.dumps(answer, indent=2) if as_json else describe_status(answer))
    if answer["health"] == "unavailable":
        sys.exit(1)


def _fetch(url: str, key: str) -> dict[str, Any]:
    request = urllib.request.Request(url, headers={"authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.urlopen(request, timeout=STATUS_TIMEOUT_S) as response:
            answer: dict[str, Any] = json.load(response)
            return answer
    except urllib.error.HTTPError as error:
        hint = "Give a key with --api-key." if error.code == 401 else "Is it a ringfence server?"
        raise click.ClickException(f"{url} answered {error.code}. {hint}") from None
    except (urllib.error.URLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise click.ClickException(f"{url} can't be read: {reason}. Start the server, or give its --url.") from None


if __name__ == "__main__":
    main()
