"""The configuration: one TOML file, each of whose keys is also an option and an environment variable.

Precedence: option (`--queue-requests 8`), then environment (`RINGFENCE_QUEUE_REQUESTS=8`), then file (`queue_requests
= 8`), then the default. Everything is checked before anything starts; an error names the key, its value, where that
came from, and the remedy. Unknown keys are errors, in the file and among RINGFENCE_ variables.
"""

import dataclasses
import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from server import keys
from server.keys import BadValue, Parser, key

PREFIX = "RINGFENCE_"
_KV_TYPES = ("f16", "bf16", "f32", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")
_MANY = 1 << 30


class ConfigError(Exception):
    """The configuration can't be used; the text is for the operator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Checked values. Empty texts and tuples mean: not set."""

    host: str = key(keys.text, "127.0.0.1", "address to listen on; 0.0.0.0 for all", metavar="ADDRESS")
    port: int = key(keys.integer(0, 65_535), 8000, "port to listen on; 0 for any free one", metavar="N")

    model: str = key(keys.text, "", "the model, a GGUF file", metavar="PATH")
    tokenizer: str = key(
        keys.text, "", "GGUF file whose vocabulary and chat template are used; default: the model", metavar="PATH"
    )
    model_name: str = key(keys.text, "", "name under which the model is served; default: from the GGUF", metavar="NAME")
    model_aliases: tuple[str, ...] = key(keys.names, (), "further names accepted as `model`", metavar="NAMES")
    chat_template: str = key(keys.text, "", "Jinja file used in place of the model's template", metavar="PATH")
    demo: bool = key(keys.boolean, False, "serve the demo model (extra `demo`)", metavar="FLAG")

    decoder_command: tuple[str, ...] = key(
        keys.command, (), 'program that speaks the decoder protocol, such as "strata --serve"', metavar="COMMAND"
    )
    decoder_options: tuple[str, ...] = key(
        keys.command, (), "further options of the built-in decoder; its --help lists them", metavar="WORDS"
    )
    workers: int = key(keys.workers, 0, "worker processes: auto (one per GPU, or 2 on CPUs) or a number", metavar="N")
    slots: int = key(keys.integer(1, 256), 4, "requests that each worker runs at once", metavar="N")
    context: int = key(keys.integer(64, 16_777_216), 4096, "prompt and output of a request, in tokens", metavar="N")
    ring_records: int = key(
        keys.integer(0, 1 << 24), 0, "records of each worker's token ring, rounded up; 0: 512 a slot", metavar="N"
    )
    threads: int = key(keys.integer(0, 1024), 0, "threads of each decoder; 0: its share of the cores", metavar="N")
    gpus: tuple[str, ...] | None = key(keys.gpus, None, "auto, none, or device numbers such as 0,1", metavar="LIST")
    gpu_layers: int = key(keys.integer(-1, 100_000), -1, "layers kept on the GPU; -1: all", metavar="N")
    kv_type: str = key(keys.choice(*_KV_TYPES), "f16", "type of the KV cache", metavar="TYPE")

    api_key: tuple[str, ...] = key(keys.secrets, (), "key (or keys) that clients send", metavar="KEYS", secret=True)
    admin_key: tuple[str, ...] = key(
        keys.secrets, (), "key of /admin routes; none: they are off", metavar="KEYS", secret=True
    )
    public_metrics: bool = key(keys.boolean, False, "/metrics and /status need no key", metavar="FLAG")
    cors_origins: tuple[str, ...] = key(keys.names, (), "origins whose pages may call; * for all", metavar="ORIGINS")

    queue_requests: int = key(keys.integer(0, _MANY), 256, "requests that may wait for a worker", metavar="N")
    queue_tokens: int = key(keys.integer(1, _MANY), 1_048_576, "prompt tokens that may wait for a worker", metavar="N")
    deadline_s: float = key(keys.seconds(0.1), 600.0, "longest wait for a worker", metavar="SECONDS")
    wait_for_workers_s: float = key(
        keys.seconds(0), 0.0, "while no worker serves, requests wait this long; 0: refused at once", metavar="SECONDS"
    )
    body_limit: int = key(keys.size, 32 << 20, "largest request body", metavar="SIZE")
    body_total: int = key(
        keys.size, 256 << 20, "request bodies held in memory at once; at least `body_limit`", metavar="SIZE"
    )
    body_timeout_s: float = key(keys.seconds(0.1), 30.0, "time in which a request body must arrive", metavar="SECONDS")
    header_limit: int = key(keys.size, 32 << 10, "largest request line and headers", metavar="SIZE")
    header_timeout_s: float = key(
        keys.seconds(0.1), 10.0, "time in which request headers must arrive", metavar="SECONDS"
    )
    connection_limit: int = key(keys.integer(1, 1_000_000), 1024, "connections open at once", metavar="N")
    keepalive_s: float = key(
        keys.seconds(0), 10.0, "comment line on a silent stream this often; 0: none", metavar="SECONDS"
    )
    stall_limit_s: float = key(
        keys.seconds(0.1), 60.0, "a client that takes nothing so long is dropped", metavar="SECONDS"
    )
    drain_s: float = key(
        keys.seconds(0), 30.0, "time that running requests have when the server stops", metavar="SECONDS"
    )

    hang_limit_s: float = key(keys.seconds(0.1), 300.0, "silence of a decoder that owes work", metavar="SECONDS")
    start_limit_s: float = key(keys.seconds(0.1), 900.0, "silence of a decoder that is loading", metavar="SECONDS")
    unload_idle_s: float = key(
        keys.seconds(0), 0.0, "idle decoders are unloaded after this; 0: never", metavar="SECONDS"
    )
    kill_grace_s: float = key(
        keys.seconds(0.1), 5.0, "time a decoder has to exit when it is told to", metavar="SECONDS"
    )
    backoff_first_s: float = key(
        keys.seconds(0.01), 0.5, "wait before what died is started again; doubles with each death", metavar="SECONDS"
    )
    backoff_cap_s: float = key(keys.seconds(0.01), 60.0, "longest such wait", metavar="SECONDS")
    stable_after_s: float = key(keys.seconds(0.1), 60.0, "a life this long ends a row of deaths", metavar="SECONDS")
    deaths_limit: int = key(
        keys.integer(1, 1000), 5, "deaths in a row after which a worker counts as failed", metavar="N"
    )
    watchdog_interval_s: float = key(
        keys.seconds(0.05), 0.5, "workers that run requests are looked at this often", metavar="SECONDS"
    )
    poison_limit: int = key(keys.integer(1, 100), 2, "decoders that one request may cost", metavar="N")
    memory_limit: int = key(keys.size, 0, "memory of a worker and its decoder; 0: no limit", metavar="SIZE")

    incidents_dir: str = key(keys.text, "", "folder for incident records; empty: none are kept", metavar="PATH")
    incidents_kept: int = key(keys.integer(1, 10_000), 50, "incident records kept", metavar="N")
    incidents_with_content: bool = key(
        keys.boolean, False, "incident records include prompts and output", metavar="FLAG"
    )

    log_level: str = key(
        keys.choice("debug", "info", "warning", "error"), "info", "least level logged", metavar="LEVEL"
    )
    log_format: str = key(keys.choice("text", "json"), "text", "key=value lines, or JSON objects", metavar="FORMAT")

    @property
    def tokenizer_path(self) -> str:
        return self.tokenizer or self.model


KEYS = {item.name: item for item in dataclasses.fields(Config)}


def load_config(*, options: Mapping[str, object], environment: Mapping[str, str], path: Path | None = None) -> Config:
    """Read and check everything. options: by key, only those that were given. Raises ConfigError."""
    values: dict[str, object] = {}
    for source, raw in (
        (f"{path}", _read(path) if path is not None else {}),
        ("the environment", _from_environment(environment)),
        ("the command line", options),
    ):
        values.update({name: _parse(name, value, source) for name, value in raw.items()})
    config = Config(**values)  # type: ignore[arg-type]
    _check(config)
    return config


def _read(path: Path) -> dict[str, object]:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"The configuration {path} can't be read: {error.strerror}. Give an existing file.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"The configuration {path} is not TOML: {error}.") from None


def _from_environment(environment: Mapping[str, str]) -> dict[str, object]:
    """RINGFENCE_ variables by key. RINGFENCE_CONFIG is the file's own path, not a key."""
    return {
        name.removeprefix(PREFIX).lower(): value
        for name, value in environment.items()
        if name.startswith(PREFIX) and name != PREFIX + "CONFIG"
    }


def _parse(name: str, raw: object, source: str) -> object:
    if name not in KEYS:
        near = difflib.get_close_matches(name, KEYS, n=1)
        hint = f"Did you mean `{near[0]}`?" if near else "See docs/configuration.md for the keys."
        raise ConfigError(f"There is no key `{name}` (from {source}). {hint}")
    metadata = KEYS[name].metadata
    parser: Parser = metadata["parser"]
    try:
        return parser(raw)
    except BadValue as error:
        shown = "(hidden)" if metadata["secret"] else repr(raw)
        raise ConfigError(f"`{name}` can't be {shown} (from {source}): {error}.") from None


def _check(config: Config) -> None:
    """Rules that bind several keys."""
    if config.demo and config.model:
        raise ConfigError("`demo` and `model` are both set. Leave one out.")
    if not (config.model or config.demo or config.decoder_command):
        raise ConfigError("There is no model. Set `model` to a GGUF file (--model PATH.gguf), or use --demo.")
    if config.decoder_command and not (config.tokenizer_path or config.demo):
        raise ConfigError(
            "`decoder_command` needs a vocabulary. Set `tokenizer` to a GGUF file of the same model (--tokenizer PATH)."
        )
    if config.decoder_command and config.decoder_options:
        raise ConfigError("`decoder_options` is for the built-in decoder. Put them into `decoder_command`.")
    for name in ("model", "tokenizer", "chat_template"):
        path = getattr(config, name)
        if path and not Path(path).expanduser().is_file():
            raise ConfigError(f"`{name}` can't be {path!r}: there is no such file. Give the path of a readable file.")
    for name in ("model", "tokenizer"):
        path = getattr(config, name)
        if path and not (name == "model" and config.decoder_command and config.tokenizer):
            _check_gguf(name, Path(path).expanduser())


def _check_gguf(name: str, path: Path) -> None:
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise ConfigError(f"`{name}` can't be {str(path)!r}: {error.strerror}. Give a readable file.") from None
    if magic != b"GGUF":
        raise ConfigError(f"`{name}` can't be {str(path)!r}: it is not a GGUF file. Convert the model to GGUF.")
