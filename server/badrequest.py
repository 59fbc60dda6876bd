"""A request that can't be served as asked, and why."""

from http import HTTPStatus


class BadRequest(Exception):
    """The client's mistake. Becomes OpenAI's error envelope with status 400.

    message: a whole sentence that says what to change. param: the field at fault, with its index
    (`messages[2].content`), or None for the request as a whole. code: a stable word for programs, or None.
    """

    status = HTTPStatus.BAD_REQUEST
    type = "invalid_request_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.message!r}, param={self.param!r}, code={self.code!r})"
