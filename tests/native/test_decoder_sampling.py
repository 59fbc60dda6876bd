"""What the decoder samples: determinism, options, grammar, logprobs, and a stream cut and resumed at every token."""

import math
from base64 import b64encode
from collections import Counter

import pytest

from tests.native.decoder_process import DecoderProcess, prompt_of, text_of
from tests.tiny_model import EOS, IM_END, VOCAB_SIZE

PROMPT = prompt_of(1, 40)
NUMBERS = b64encode(b'root ::= "[" number ("," number){5} "]"\nnumber ::= [0-9]{1,4}').decode()


def test_greedy_output_is_the_same_every_time_and_varied(decoder: DecoderProcess) -> None:
    first = decoder.generate(100, PROMPT)
    second = decoder.generate(100, PROMPT)
    assert first.tokens == second.tokens
    assert first.finish == "length"
    assert len(first.tokens) == 100
    assert len(set(first.tokens)) > 40


@pytest.mark.parametrize("keys", [{}, {"temperature": 1, "seed": 7}], ids=["greedy", "seeded"])
def test_eight_requests_at_once_equal_each_alone(decoder: DecoderProcess, keys: dict[str, object]) -> None:
    prompts = [prompt_of(100 + i, 20 + 9 * i) for i in range(8)]
    alone = [decoder.generate(60, prompt, **keys).tokens for prompt in prompts]
    rids = [decoder.begin(60, prompt, **keys) for prompt in prompts]
    assert [decoder.answer(rid).tokens for rid in rids] == alone


def test_a_seed_fixes_the_draws_and_another_seed_changes_them(decoder: DecoderProcess) -> None:
    outputs = [decoder.generate(40, PROMPT, temperature=1, seed=seed).tokens for seed in (5, 5, 6)]
    assert outputs[0] == outputs[1] != outputs[2]


def test_without_a_seed_draws_differ(decoder: DecoderProcess) -> None:
    assert decoder.generate(40, PROMPT, temperature=1).tokens != decoder.generate(40, PROMPT, temperature=1).tokens


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"penalty_repeat": 1.3, "penalty_freq": 0.5, "penalty_present": 0.2, "penalty_last_n": 16},
        {"temperature": 1, "seed": 3},
        {"temperature": 1.5, "seed": 4, "top_p": 0.9, "penalty_freq": 1, "penalty_last_n": 200},
        {"temperature": 1, "seed": 9, "grammar": NUMBERS},
        {"grammar": NUMBERS, "logprobs": 0},
    ],
    ids=["greedy", "greedy-penalties", "seeded", "seeded-penalties", "seeded-grammar", "greedy-grammar"],
)
def test_a_stream_cut_at_any_token_and_resumed_goes_on_the_same(
    decoder: DecoderProcess, keys: dict[str, object]
) -> None:
    whole = decoder.generate(24, PROMPT, **keys).tokens
    for cut in range(1, len(whole)):
        rest = decoder.generate(24 - cut, PROMPT + whole[:cut], resume=cut, **keys)
        assert rest.tokens == whole[cut:], f"cut at {cut}"
        assert rest.done[:2] == [str(len(whole) - cut), str(len(PROMPT))]


@pytest.mark.parametrize("keys", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1}, {"temperature": 1e-9}])
def test_the_narrowest_setting_of_each_option_is_greedy(decoder: DecoderProcess, keys: dict[str, object]) -> None:
    options = {"temperature": 2, "seed": 1} | keys
    assert decoder.generate(30, PROMPT, **options).tokens == decoder.generate(30, PROMPT).tokens


@pytest.mark.parametrize(
    ("keys", "is_kept"),
    [
        ({"top_k": 4}, lambda rank, logprob, before: rank < 4),
        ({"top_p": 0.4}, lambda rank, logprob, before: before < 0.4),
        ({"min_p": 0.3}, lambda rank, logprob, before: logprob >= math.log(0.3)),
        ({"top_k": 8, "top_p": 0.5, "min_p": 0.2}, None),
    ],
    ids=["top_k", "top_p", "min_p", "all"],
)
def test_draws_follow_the_truncated_distribution(
    decoder: DecoderProcess, keys: dict[str, object], is_kept: object
) -> None:
    ranked = decoder.generate(1, PROMPT, logprobs=20).alternatives[0]
    top = ranked[0][1]
    kept: dict[int, float] = {}
    before = 0.0
    mass_8 = sum(math.exp(logprob) for _, logprob in ranked[:8])
    for rank, (id_, logprob) in enumerate(ranked):
        if is_kept is None:
            keep = rank < 8 and before < 0.5 * mass_8 and logprob - top >= math.log(0.2)
        else:
            assert callable(is_kept)
            keep = bool(is_kept(rank, logprob - top if "min_p" in keys else logprob, before))
        if keep:
            kept[id_] = math.exp(logprob)
        before += math.exp(logprob)
    draws = 400
    seen = Counter(decoder.generate(1, PROMPT, temperature=1, seed=seed, **keys).tokens[0] for seed in range(1, draws))
    assert set(seen) <= set(kept)
    for id_, weight in kept.items():
        expected = draws * weight / sum(kept.values())
        assert abs(seen[id_] - expected) <= 5 * math.sqrt(expected) + 1


def test_draws_without_truncation_follow_the_whole_distribution(decoder: DecoderProcess) -> None:
    ranked = decoder.generate(1, PROMPT, logprobs=20).alternatives[0]
    draws = 400
    seen = Counter(decoder.generate(1, PROMPT, temperature=1, seed=seed).tokens[0] for seed in range(1, draws))
    for id_, logprob in ranked:
        expected = draws * math.exp(logprob)
        assert abs(seen[id_] - expected) <= 5 * math.sqrt(expected) + 1
    assert len(seen) > len(ranked)  # the tail is drawn too


def test_logprobs_are_of_the_raw_distribution(decoder: DecoderProcess) -> None:
    answer = decoder.generate(20, PROMPT, logprobs=20)
    for token, logprob, ranked in zip(answer.tokens, answer.logprobs, answer.alternatives, strict=True):
        assert ranked[0] == (token, logprob)
        values = [value for _, value in ranked]
        assert len({id_ for id_, _ in ranked}) == 20
        assert values == sorted(values, reverse=True)
        assert 0.3 < sum(map(math.exp, values)) <= 1 + 1e-5
    biased = decoder.generate(1, PROMPT, logprobs=20, temperature=1, seed=1, logit_bias=f"{answer.tokens[0]}:-50")
    assert biased.alternatives[0] == answer.alternatives[0]
    assert biased.tokens[0] != answer.tokens[0]


def test_logprobs_0_sends_only_the_chosen_tokens(decoder: DecoderProcess) -> None:
    answer = decoder.generate(5, PROMPT, logprobs=0)
    assert all(len(words) == 2 for words in answer.words("T"))
    assert all(logprob < 0 for logprob in answer.logprobs)


def test_all_logprobs_sum_to_one(decoder: DecoderProcess) -> None:
    ids = range(0, VOCAB_SIZE, 10)  # each forced by a bias; the sum over a sample against the mean of the rest
    forced = [decoder.generate(1, PROMPT, logprobs=0, logit_bias=f"{id_}:200") for id_ in ids]
    assert [answer.tokens[0] for answer in forced] == list(ids)
    assert 0.01 < sum(math.exp(answer.logprobs[0]) for answer in forced) < 0.9


def test_logit_bias_forces_and_forbids(decoder: DecoderProcess) -> None:
    favourite = decoder.generate(1, PROMPT).tokens[0]
    assert decoder.generate(5, PROMPT, logit_bias="77:100").tokens == [77] * 5
    assert favourite not in decoder.generate(20, PROMPT, logit_bias=f"{favourite}:-100").tokens


@pytest.mark.parametrize("end", [EOS, IM_END])
def test_the_end_token_is_sent_and_counted(decoder: DecoderProcess, end: int) -> None:
    answer = decoder.generate(50, PROMPT, logit_bias=f"{end}:100")
    assert answer.tokens == [end]
    assert answer.done[0] == "1"
    assert answer.finish == "stop"


def test_penalties_look_at_prompt_and_output_within_their_window(decoder: DecoderProcess) -> None:
    plain = decoder.generate(1, PROMPT, logit_bias="77:30").tokens[0]
    assert plain == 77
    with_77 = [*PROMPT[:-5], 77, *PROMPT[-4:]]
    keys: dict[str, object] = {"logit_bias": "77:30", "penalty_present": 60}
    assert decoder.generate(1, with_77, penalty_last_n=3, **keys).tokens == [77]
    assert decoder.generate(1, with_77, penalty_last_n=30, **keys).tokens != [77]
    assert decoder.generate(1, with_77, penalty_last_n=-1, **keys).tokens != [77]
    assert decoder.generate(3, PROMPT, penalty_last_n=30, **keys).tokens.count(77) == 1


@pytest.mark.parametrize("keys", [{}, {"temperature": 1, "seed": 11}, {"temperature": 3, "seed": 2, "top_k": 5}])
def test_a_grammar_is_followed_to_its_end(decoder: DecoderProcess, keys: dict[str, object]) -> None:
    answer = decoder.generate(60, PROMPT, grammar=NUMBERS, **keys)
    text = text_of(answer.tokens)
    assert answer.finish == "stop"
    assert text[0] == "[" and text[-1] == "]"
    assert len(text[1:-1].split(",")) == 6
    assert all(number.isdigit() and len(number) <= 4 for number in text[1:-1].split(","))


@pytest.mark.parametrize("text", ["nonsense", "start ::= [a-z]", "root ::= root", "root ::= " + "(" * 9000])
def test_an_invalid_grammar_is_refused(decoder: DecoderProcess, text: str) -> None:
    answer = decoder.generate(5, PROMPT, grammar=b64encode(text.encode()).decode())
    assert answer.error.startswith("grammar: ")


def test_resumed_tokens_that_break_the_grammar_are_refused(decoder: DecoderProcess) -> None:
    answer = decoder.generate(5, PROMPT, grammar=NUMBERS, resume=3)
    assert answer.error.startswith("grammar: ")
