"""A request of a run: what is sent, and how its answer is judged."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from bench.chaos.answers import Answer, Progress, ask
from bench.chaos.verdict import Verdict


class Call(ABC):
    """One request. leave_after: its client closes the connection after this many pieces of text."""

    name: str
    path: str
    body: dict[str, Any]
    leave_after: int | None = None

    @abstractmethod
    def judge(self, answer: Answer) -> Verdict:
        """Hold an answer against the one that is due."""

    async def send(self, port: int, progress: Progress | None = None) -> Answer:
        return await ask(port, self.path, self.body, progress=progress, leave_after=self.leave_after)

    @staticmethod
    def form_fault(answer: Answer, *, finish: str, usage: dict[str, int]) -> str:
        """What is wrong with the figures of an answer that came to its end; empty if nothing is."""
        if answer.fault:
            return answer.fault
        if answer.finish != finish:
            return f"finish_reason {answer.finish}, not {finish}"
        wrong = {name: answer.usage.get(name) for name, value in usage.items() if answer.usage.get(name) != value}
        return f"usage {wrong}, not {usage}" if wrong else ""
