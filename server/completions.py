"""POST /v1/completions."""

from collections.abc import Sequence

import msgspec

from server import prompts
from server.chunks import CompletionChunks
from server.generation import Generation, Prepared, now
from server.logprobs import Taker, completion_logprobs
from server.output import Output
from server.sampling import alternatives, stop_strings
from server.schemas import Completion, CompletionChoice, CompletionLogprobs, CompletionRequest
from server.streaming import Chunks


class Completions(Generation[CompletionRequest]):
    """Continues prompts. With `echo` each choice's text begins with its prompt's."""

    path = "/v1/completions"
    kind = CompletionRequest
    id_prefix = "cmpl-"

    async def prepare(self, request: CompletionRequest) -> Prepared:
        tokenizer, context = self.service.tokenizer, self.service.pool.context
        given = prompts.inputs(request)
        if prompts.needs_thread(given, tokenizer):
            ids = await self.service.in_thread(lambda: prompts.read_all(given, tokenizer, context=context))
        else:
            ids = prompts.read_all(given, tokenizer, context=context)
        echoes = None
        if request.echo:
            echoes = [text if isinstance(text, str) else tokenizer.decode(text) for text in given]
        return Prepared(prompts=ids, stops=stop_strings(request), echoes=echoes)

    def chunks(self, *, id: str, has_usage: bool) -> Chunks:
        return CompletionChunks(id=id, model=self.service.model_name, created=now(), has_usage=has_usage)

    def taker(self, request: CompletionRequest) -> Taker | None:
        count = alternatives(request)
        if count is None:
            return None
        tokenizer = self.service.tokenizer
        return completion_logprobs(lambda token: tokenizer.piece(token, special=True), count)

    def whole(self, id: str, outputs: Sequence[Output], texts: Sequence[str], take: Taker | None) -> msgspec.Struct:
        return Completion(
            id=id,
            created=now(),
            model=self.service.model_name,
            choices=[
                CompletionChoice(
                    index=output.index,
                    text=output.echo + text,
                    logprobs=_logprobs(take, output),
                    finish_reason=output.finish_reason,
                )
                for output, text in zip(outputs, texts, strict=True)
            ],
        )


def _logprobs(take: Taker | None, output: Output) -> CompletionLogprobs | None:
    entries = None if take is None else take(output, 0)
    assert entries is None or isinstance(entries, CompletionLogprobs)
    return entries
