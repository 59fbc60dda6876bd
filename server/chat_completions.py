"""POST /v1/chat/completions."""

import asyncio
from collections.abc import Sequence

import msgspec
from msgspec import UNSET

from server import prompts
from server.badrequest import BadRequest
from server.chat import is_short
from server.chunks import ChatChunks
from server.generation import Generation, Prepared, now
from server.logprobs import Taker, chat_logprobs
from server.output import Output
from server.sampling import alternatives, stop_strings
from server.schemas import (
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    ChatCompletionRequest,
    ChatLogprobs,
    Usage,
)
from server.streaming import Chunks

RENDER_LIMIT_S = 10.0
_NO_USAGE = Usage(prompt_tokens=0, completion_tokens=0, total_tokens=0)


class ChatCompletions(Generation[ChatCompletionRequest]):
    """Answers a conversation, through the model's chat template."""

    path = "/v1/chat/completions"
    kind = ChatCompletionRequest
    id_prefix = "chatcmpl-"

    async def prepare(self, request: ChatCompletionRequest) -> Prepared:
        if is_short(request.messages):
            text = self._render(request)
        else:
            text = await self._render_in_thread(request)
        tokenizer, context = self.service.tokenizer, self.service.pool.context
        if tokenizer.is_short(text):
            ids = prompts.read_chat(text, tokenizer, context=context)
        else:
            ids = await self.service.in_thread(lambda: prompts.read_chat(text, tokenizer, context=context))
        stops = tuple(dict.fromkeys((*stop_strings(request), *self.service.template.stops)))
        return Prepared(prompts=[ids], stops=stops)

    def chunks(self, *, id: str, has_usage: bool) -> Chunks:
        return ChatChunks(id=id, model=self.service.model_name, created=now(), has_usage=has_usage)

    def taker(self, request: ChatCompletionRequest) -> Taker | None:
        count = alternatives(request)
        if count is None:
            return None
        tokenizer = self.service.tokenizer
        return chat_logprobs(lambda token: tokenizer.piece(token, special=True), count)

    def whole(self, id: str, outputs: Sequence[Output], texts: Sequence[str], take: Taker | None) -> msgspec.Struct:
        return ChatCompletion(
            id=id,
            created=now(),
            model=self.service.model_name,
            choices=[
                ChatChoice(
                    index=output.index,
                    message=AssistantMessage(content=text),
                    logprobs=_logprobs(take, output),
                    finish_reason=output.finish_reason,
                )
                for output, text in zip(outputs, texts, strict=True)
            ],
            usage=_NO_USAGE,
            timings=UNSET,
        )

    def _render(self, request: ChatCompletionRequest) -> str:
        wants_prompt = request.add_generation_prompt
        return self.service.template.render(
            request.messages,
            tools=request.tools,
            add_generation_prompt=True if wants_prompt is None else wants_prompt,
            variables=request.chat_template_kwargs,
        )

    async def _render_in_thread(self, request: ChatCompletionRequest) -> str:
        try:
            async with asyncio.timeout(RENDER_LIMIT_S):
                return await self.service.in_thread(lambda: self._render(request))
        except TimeoutError:
            raise BadRequest(
                f"The chat template took longer than {RENDER_LIMIT_S:g} s for this conversation. Send a shorter one.",
                param="messages",
                code="chat_template_error",
            ) from None


def _logprobs(take: Taker | None, output: Output) -> ChatLogprobs | None:
    entries = None if take is None else take(output, 0)
    assert entries is None or isinstance(entries, ChatLogprobs)
    return entries
