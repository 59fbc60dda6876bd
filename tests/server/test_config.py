"""Configuration: precedence, and errors that name key, value, source and remedy."""

from pathlib import Path
from typing import Any

import pytest

from server.config import KEYS, Config, ConfigError, load_config

DOCS = Path(__file__).parents[2] / "docs" / "configuration.md"


def load(
    options: dict[str, object] | None = None,
    environment: dict[str, str] | None = None,
    file: Path | None = None,
) -> Config:
    return load_config(options={"demo": True, **(options or {})}, environment=environment or {}, path=file)


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "ringfence.toml"
    path.write_text(text)
    return path


def test_the_command_line_beats_the_environment_beats_the_file_beats_the_default(tmp_path: Path) -> None:
    file = written(tmp_path, "slots = 2\nport = 2\nthreads = 2\n")
    config = load({"slots": "4"}, {"RINGFENCE_SLOTS": "3", "RINGFENCE_PORT": "3", "PATH": "/bin"}, file)
    assert (config.slots, config.port, config.threads, config.context) == (4, 3, 2, 4096)


@pytest.mark.parametrize(
    ("name", "raw", "value"),
    [
        ("port", "8080", 8080),
        ("port", 8080, 8080),
        ("workers", "auto", 0),
        ("workers", 3, 3),
        ("gpus", "auto", None),
        ("gpus", "none", ()),
        ("gpus", [0, 2], ("0", "2")),
        ("gpus", "0,2", ("0", "2")),
        ("body_limit", "32MiB", 32 << 20),
        ("body_limit", "1.5 GB", 3 << 29),
        ("body_limit", 1000, 1000),
        ("memory_limit", "0", 0),
        ("decoder_command", 'strata --serve --model "a b"', ("strata", "--serve", "--model", "a b")),
        ("decoder_command", ["strata", "a b"], ("strata", "a b")),
        ("api_key", "first-key-0,second-key-1", ("first-key-0", "second-key-1")),
        ("api_key", ["first-key-0"], ("first-key-0",)),
        ("public_metrics", "yes", True),
        ("public_metrics", False, False),
        ("keepalive_s", 0, 0.0),
        ("stall_limit_s", "2.5", 2.5),
        ("model_aliases", "a, b", ("a", "b")),
    ],
)
def test_values_are_read_from_text_and_from_toml(name: str, raw: object, value: object) -> None:
    options: dict[str, object] = {name: raw}
    if name == "decoder_command":
        assert getattr(load(options), name) == value
    else:
        assert getattr(load(options), name) == value


@pytest.mark.parametrize(
    ("name", "raw", "remedy"),
    [
        ("port", "http", "0 to 65535"),
        ("port", 70_000, "0 to 65535"),
        ("port", True, "0 to 65535"),
        ("slots", 0, "1 to 256"),
        ("workers", "many", '"auto"'),
        ("workers", 0, '"auto"'),
        ("gpus", "first", "ringfence check"),
        ("gpus", [0, 0], "ringfence check"),
        ("body_limit", "lots", '"32MiB"'),
        ("body_limit", -1, '"32MiB"'),
        ("kv_type", "q2", "q8_0"),
        ("log_level", "loud", "debug"),
        ("deadline_s", 0, "from 0.1"),
        ("deadline_s", "soon", "from 0.1"),
        ("deadline_s", float("nan"), "from 0.1"),
        ("demo", "perhaps", "true or false"),
        ("host", 5, "text"),
        ("decoder_command", "a 'b", "quotes"),
        ("model_aliases", [1], "text"),
    ],
)
def test_a_bad_value_names_key_value_source_and_remedy(name: str, raw: Any, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load({name: raw})
    text = str(caught.value)
    assert f"`{name}`" in text and repr(raw) in text and "the command line" in text and remedy in text


@pytest.mark.parametrize("key", ["short", "with space here", "tab\tinside", "kürzel-key"])
def test_a_bad_secret_is_not_shown(key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load({"api_key": [key]})
    assert key not in str(caught.value) and "8 printable" in str(caught.value)


@pytest.mark.parametrize(
    ("given", "hint"), [("sloots", "`slots`"), ("drain", "`drain_s`"), ("zzz", "docs/configuration.md")]
)
def test_an_unknown_key_is_rejected_with_the_nearest_one(tmp_path: Path, given: str, hint: str) -> None:
    with pytest.raises(ConfigError, match="no key") as caught:
        load(file=written(tmp_path, f"{given} = 1\n"))
    assert hint in str(caught.value)
    with pytest.raises(ConfigError, match="the environment"):
        load(environment={f"RINGFENCE_{given.upper()}": "1"})


def test_the_file_must_exist_and_be_toml(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"can't be read: No such file"):
        load(file=tmp_path / "absent.toml")
    with pytest.raises(ConfigError, match="not TOML"):
        load(file=written(tmp_path, "slots = \n"))


def test_a_model_is_needed() -> None:
    with pytest.raises(ConfigError, match="no model"):
        load_config(options={}, environment={})
    with pytest.raises(ConfigError, match="needs a vocabulary"):
        load_config(options={"decoder_command": "strata --serve"}, environment={})
    with pytest.raises(ConfigError, match="both set"):
        load({"model": "x.gguf"})


def test_a_model_must_be_a_gguf(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    options: dict[str, object] = {"model": str(path)}
    with pytest.raises(ConfigError, match="no such file"):
        load_config(options=options, environment={})
    path.write_bytes(b"not it")
    with pytest.raises(ConfigError, match="not a GGUF"):
        load_config(options=options, environment={})
    path.write_bytes(b"GGUF....")
    assert load_config(options=options, environment={}).tokenizer_path == str(path)


def test_every_key_is_documented() -> None:
    text = DOCS.read_text()
    missing = [name for name in KEYS if f"`{name}`" not in text]
    assert not missing
