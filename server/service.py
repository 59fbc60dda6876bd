"""What the endpoints of one server share."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from server.backend import Backend
from server.body import Bodies
from server.chat import ChatTemplate
from server.config import Config
from server.exchange import Exchange
from server.failures import ModelNotFound
from server.metrics import Metrics
from server.ticker import Ticker
from server.tokenizer import Tokenizer

THREADS = 2
Result = TypeVar("Result")


@dataclass(slots=True, kw_only=True)
class Service:
    """Configuration, pool and the model's text side. live: exchanges being served now."""

    config: Config
    pool: Backend
    tokenizer: Tokenizer
    template: ChatTemplate
    ticker: Ticker
    metrics: Metrics
    model_name: str
    bodies: Bodies
    created: int = field(default_factory=lambda: int(time.time()))
    live: set[Exchange] = field(default_factory=set)
    threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(THREADS, thread_name_prefix="ringfence-text")
    )

    @property
    def model_names(self) -> tuple[str, ...]:
        """Every name that `model` may have."""
        return (self.model_name, *self.config.model_aliases)

    def check_model(self, name: str | None) -> None:
        """Raise ModelNotFound for a name that is not ours; none at all is fine."""
        if name and name not in self.model_names:
            raise ModelNotFound(name, self.model_names)

    async def in_thread(self, work: Callable[[], Result]) -> Result:
        """Run what could hold the event loop for more than 5 ms. Few threads: the rest wait their turn."""
        return await asyncio.get_running_loop().run_in_executor(self.threads, work)


def new_service(config: Config, pool: Backend, tokenizer: Tokenizer) -> Service:
    """The service around a pool and a tokenizer. Raises chat.TemplateError for a broken `chat_template`."""
    ticker = Ticker()
    name = config.model_name or tokenizer.model_name
    bodies = Bodies(
        limit_bytes=config.body_limit,
        total_bytes=max(config.body_total, config.body_limit),
        timeout_s=config.body_timeout_s,
    )
    return Service(
        config=config,
        pool=pool,
        tokenizer=tokenizer,
        template=ChatTemplate.from_gguf(
            tokenizer.chat_template,
            bos=_text_of(tokenizer, tokenizer.bos),
            eos=_text_of(tokenizer, tokenizer.eos),
            override=config.chat_template or None,
        ),
        ticker=ticker,
        metrics=Metrics(pool.snapshot, ticker, bodies, model=name),
        model_name=name,
        bodies=bodies,
    )


def _text_of(tokenizer: Tokenizer, token: int | None) -> str:
    return "" if token is None else tokenizer.piece(token, special=True).decode("utf-8", "replace")
