"""Where the built-in decoder is."""

from pathlib import Path

NAME = "ringfence-decoder"


class DecoderMissing(Exception):
    """The built-in decoder has not been built for this installation."""

    def __init__(self, path: Path) -> None:
        super().__init__(
            f"The decoder {path} does not exist. Build it with `make decoder` in the source tree, or configure "
            "another with `decoder_command`."
        )
        self.path = path


def decoder_path() -> Path:
    """The built-in decoder's executable. Raises DecoderMissing when it has not been built."""
    path = Path(__file__).resolve().parent / "bin" / NAME
    if not path.is_file():
        raise DecoderMissing(path)
    return path
