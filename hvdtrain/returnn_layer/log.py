"""`returnn.log.log`: `print(..., file=log.v4)` writes into hvdtrain's log."""

from __future__ import annotations

from hvdtrain.log import say


class Stream:
    """What is printed to it becomes lines of the log, shown from a `log_verbosity` on."""

    def __init__(self, level: int) -> None:
        self._level = level
        self._rest = ""

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            say(self._level, line)
        return len(text)

    def flush(self) -> None:
        """Whole lines are written at once; what is no whole line waits for its end."""


class Log:
    """Streams for the levels 1 to 5."""

    def __init__(self) -> None:
        self.v1, self.v2, self.v3, self.v4, self.v5 = self.v = [Stream(level) for level in range(1, 6)]
        self.error = self.v1

    def print_warning(self, text: str, prefix_text: str = "WARNING:", extra_text: str | None = None) -> None:
        say(2, f"{prefix_text} {text}{'' if extra_text is None else f' {extra_text}'}")

    def print_deprecation_warning(self, text: str) -> None:
        self.print_warning(text, prefix_text="DEPRECATION WARNING:")


log = Log()
