"""What `ringfence check` looks at: everything that could keep `serve` from serving, without loading the model."""

import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from native.binary import DecoderMissing, decoder_path
from server.chat import ChatTemplate
from server.config import Config, ConfigError
from server.demo import DemoError
from server.fleet import pool_settings, usable_cores
from server.serving import BindError, bind, raise_file_limit
from server.tokenizer import Tokenizer, TokenizerError
from workers.devices import Device

HELP_TIMEOUT_S = 20.0
_KNOWN_ERRORS = (ConfigError, DecoderMissing, TokenizerError, DemoError, BindError)


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the table. detail: what was found, or the error with its remedy."""

    subject: str
    is_good: bool
    detail: str


def findings(config: Config, devices: list[Device]) -> Iterator[Finding]:
    """One after the other, so that a caller can show progress."""
    for subject, look in (
        ("tokenizer", lambda: _tokenizer(config)),
        ("decoder", lambda: _decoder(config)),
        ("devices", lambda: _devices(devices)),
        ("workers", lambda: _workers(config, devices)),
        ("port", lambda: _port(config)),
        ("files", lambda: _files(config)),
    ):
        yield _finding(subject, look)


def _finding(subject: str, look: Callable[[], str]) -> Finding:
    try:
        return Finding(subject, True, look())
    except _KNOWN_ERRORS as error:
        return Finding(subject, False, str(error))


def _tokenizer(config: Config) -> str:
    tokenizer = Tokenizer.load(config.tokenizer_path)
    template = ChatTemplate.from_gguf(tokenizer.chat_template, override=config.chat_template or None)
    chat = "no chat template, a plain transcript is used" if template.is_fallback else "chat template found"
    return f"{tokenizer.model_name}, {tokenizer.vocabulary} tokens, {chat}"


def _decoder(config: Config) -> str:
    if config.decoder_command:
        program = shutil.which(config.decoder_command[0])
        if program is None:
            raise ConfigError(
                f"`decoder_command` can't start {config.decoder_command[0]!r}: there is no such program. Give its path."
            )
        return program
    path = decoder_path()
    try:
        done = subprocess.run([str(path), "--help"], capture_output=True, timeout=HELP_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"The decoder {path} does not start: {error}. Build it again with `make`.") from None
    if done.returncode != 0:
        words = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:] or ["no message"]
        raise ConfigError(f"The decoder {path} ends with {done.returncode}: {words[0]}. Build it again with `make`.")
    return str(path)


def _devices(devices: list[Device]) -> str:
    listed = ", ".join(f"{index}: {device.name}" for index, device in enumerate(devices))
    return listed or f"no GPU; {sum(map(len, usable_cores()))} CPU cores"


def _workers(config: Config, devices: list[Device]) -> str:
    settings = pool_settings(config, devices)
    each = [
        f"{worker.index}: {worker.device}" + (f" cores {_span(worker.cores)}" if worker.cores else "")
        for worker in settings.workers
    ]
    return f"{'; '.join(each)}; {settings.slots} slots of {settings.context} tokens each"


def _span(cores: tuple[int, ...]) -> str:
    """Cores as the kernel writes them: 0-3,8."""
    parts: list[list[int]] = []
    for core in sorted(cores):
        if parts and parts[-1][-1] == core - 1:
            parts[-1][-1:] = [core] if len(parts[-1]) == 2 else [parts[-1][-1], core]
        else:
            parts.append([core])
    return ",".join("-".join(map(str, part)) for part in parts)


def _port(config: Config) -> str:
    bind(config.host, config.port).close()
    return f"{config.host}:{config.port} is free"


def _files(config: Config) -> str:
    files = raise_file_limit(config.connection_limit)
    if files < config.connection_limit + 64:
        raise ConfigError(
            f"`connection_limit` can't be {config.connection_limit}: this process may open {files} files. Lower it, or raise "
            "the limit (ulimit -n, or minfds of supervisord)."
        )
    return f"{files} may be open"
