"""A tiny llama-architecture GGUF with random weights, for fast tests against a real decoder.

    python -m tests.tiny_model PATH [--seed N] [--layers N] [--width N] [--context N] [--exact]

About 1.2 MB with the defaults: two layers of width 64 and 1,706 tokens. The same arguments give the same bytes.

- Vocabulary: byte-level BPE in GPT-2's manner, so every text round-trips. 6 special tokens (SPECIALS, ids 0 to 5), the
  256 bytes (id = 6 + byte), all pairs of lower-case letters, those pairs after a space, and 92 pairs of digits.
- Weights: the logits have a standard deviation of about 3.5 and depend on the whole prefix, so greedy output is varied and
  the gap between the two best candidates is mostly far above 1e-3. The special tokens' rows are damped: a text ends by
  itself only when a request biases an end token (`logit_bias`) or a grammar asks for it.
- One attention head of 64: ggml's vector code for f16 takes 64 numbers at once where there is AVX-512, and the rest one by
  one, so that heads of 16 or 32 would halve the speed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

SPECIALS = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<pad>")
UNK, BOS, EOS, IM_START, IM_END, PAD = range(len(SPECIALS))
FIRST_BYTE = len(SPECIALS)
VOCAB_SIZE = 1706

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

Floats = npt.NDArray[np.float32]


def byte_symbols() -> list[str]:
    """GPT-2's printable stand-in for each of the 256 bytes, by byte value."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]


def merge_pairs() -> Iterator[tuple[str, str]]:
    """The BPE merges in rank order; each one makes one more token."""
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    space = byte_symbols()[ord(" ")]
    yield from ((left, right) for left in letters for right in letters)
    yield from ((space, left + right) for left in letters for right in letters)
    digits = [(left, right) for left in "0123456789" for right in "0123456789"]
    yield from digits[: VOCAB_SIZE - FIRST_BYTE - 256 - 2 * len(letters) ** 2]


def add_tokenizer(writer: gguf.GGUFWriter) -> None:
    merges = list(merge_pairs())
    tokens = [*SPECIALS, *byte_symbols(), *(left + right for left, right in merges)]
    if len(tokens) != VOCAB_SIZE or len(set(tokens)) != VOCAB_SIZE:
        raise AssertionError("the vocabulary has missing or repeated tokens")
    types = [gguf.TokenType.CONTROL] * len(SPECIALS) + [gguf.TokenType.NORMAL] * (VOCAB_SIZE - len(SPECIALS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([f"{left} {right}" for left, right in merges])
    writer.add_unk_token_id(UNK)
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_eot_token_id(IM_END)
    writer.add_pad_token_id(PAD)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def add_hyperparameters(
    writer: gguf.GGUFWriter, *, layers: int, width: int, heads: int, hidden: int, context: int
) -> None:
    writer.add_name("ringfence-tiny")
    writer.add_context_length(context)
    writer.add_embedding_length(width)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(hidden)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_rope_dimension_count(width // heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCAB_SIZE)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)


def tensors(*, seed: int, layers: int, width: int, hidden: int) -> Iterator[tuple[str, Floats]]:
    """Name and values of every tensor; the order of the draws is part of the result."""
    draws = np.random.default_rng(seed)

    def normal(rows: int, columns: int, gain: float) -> Floats:
        values: Floats = (draws.standard_normal((rows, columns)) * gain / columns**0.5).astype(np.float32)
        return values

    ones = np.ones(width, np.float32)
    output = normal(VOCAB_SIZE, width, 3.5)
    output[: len(SPECIALS)] *= 0.4
    yield "token_embd.weight", draws.standard_normal((VOCAB_SIZE, width)).astype(np.float32)
    yield "output_norm.weight", ones
    yield "output.weight", output
    for layer in range(layers):
        block = f"blk.{layer}"
        yield f"{block}.attn_norm.weight", ones
        yield f"{block}.attn_q.weight", normal(width, width, 1.5)
        yield f"{block}.attn_k.weight", normal(width, width, 1.5)
        yield f"{block}.attn_v.weight", normal(width, width, 2.0)
        yield f"{block}.attn_output.weight", normal(width, width, 2.0)
        yield f"{block}.ffn_norm.weight", ones
        yield f"{block}.ffn_gate.weight", normal(hidden, width, 1.5)
        yield f"{block}.ffn_up.weight", normal(hidden, width, 1.5)
        yield f"{block}.ffn_down.weight", normal(width, hidden, 1.5)


def build(
    path: str | Path,
    *,
    seed: int = 0,
    layers: int = 2,
    width: int = 64,
    heads: int = 1,
    hidden: int = 128,
    context: int = 4096,
) -> Path:
    """Write the model to `path` and return it. `width` is a multiple of 2 * `heads`."""
    if width % (2 * heads):
        raise ValueError(f"width={width} must be a multiple of {2 * heads}, twice the number of heads")
    writer = gguf.GGUFWriter(str(path), "llama")
    add_hyperparameters(writer, layers=layers, width=width, heads=heads, hidden=hidden, context=context)
    add_tokenizer(writer)
    for name, values in tensors(seed=seed, layers=layers, width=width, hidden=hidden):
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(path)


def build_exact(path: str | Path, *, seed: int = 0) -> Path:
    """A variant on which the decoder's output does not depend on the batch at all, if it runs with `--exact`.

    libllama multiplies matrices of many columns with other code than those of one, unless a row's length is no multiple
    of its vectors, as here (62 and 126). With that the logits of a request are the same bits alone and beside others; it
    decodes at half the speed of the model that `build` writes by default, where they differ by 1e-3 and more.
    """
    return build(path, seed=seed, width=62, heads=1, hidden=126)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a tiny random-weight GGUF for tests.")
    parser.add_argument("path", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--exact", action="store_true", help="the variant of build_exact; only --seed counts")
    options = parser.parse_args()
    if options.exact:
        path = build_exact(options.path, seed=options.seed)
    else:
        path = build(
            options.path, seed=options.seed, layers=options.layers, width=options.width, context=options.context
        )
    print(f"{path}: {path.stat().st_size} bytes, {VOCAB_SIZE} tokens")


if __name__ == "__main__":
    main()
