"""The host's side of one sequence: its new tokens, their text, and whether a stop string has ended it.

Knows the tokenizer and the stop strings; knows nothing of models, batches or devices.
"""

from kimi_jax.tokenizer import StopStrings, StreamDecoder, Tokenizer


class Row:
    """Tokens as they come, until something ends the row.

    tokens, logprobs, text: without what ended it. reason: None while it goes on, then "stop" or "length".
    """

    def __init__(self, tokenizer: Tokenizer | None, stop_tokens: set[int], stop_strings: StopStrings):
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.text: str | None = None if tokenizer is None else ""
        self.reason: str | None = None
        self._decoder = None if tokenizer is None else StreamDecoder(tokenizer)
        self._ends: list[int] = []  # characters that are complete after each token
        self._stop_tokens, self._stop_strings = stop_tokens, stop_strings

    def accept(self, token: int, logprob: float) -> None:
        """Take the next token, unless the row has ended."""
        if self.reason:
            return
        if token in self._stop_tokens:
            return self._end("stop")
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if self._decoder is not None:
            self._append(self._decoder.feed([token]))
        return None

    def close(self) -> None:
        """No more tokens will come."""
        if not self.reason:
            self._end("length")

    def settled(self) -> tuple[str | None, list[int]]:
        """Text and tokens that no later token can take back: all but a possible beginning of a stop string."""
        if self.text is None:
            return None, self.tokens
        length = len(self.text) if self.reason else len(self.text) - self._stop_strings.held(self.text)
        return self.text[:length], self.tokens if self.reason else self.tokens[: self._covered(length)]

    def _append(self, text: str) -> None:
        assert self.text is not None
        before = len(self.text)
        self.text += text
        self._ends.append(len(self.text))
        at = self._stop_strings.find(self.text, before)
        if at is not None:
            kept = self._covered(at)
            self.text, self.reason = self.text[:at], "stop"
            del self.tokens[kept:], self.logprobs[kept:]

    def _end(self, reason: str) -> None:
        self.reason = reason
        if self._decoder is not None:
            tail = self._decoder.finish()
            if tail and not self.tokens == []:
                self._ends.pop()
                self._append(tail)

    def _covered(self, length: int) -> int:
        """How many leading tokens lie wholly within the first `length` characters.

        A token that completed no character by itself belongs to what follows it.
        """
        kept = sum(end <= length for end in self._ends)
        while kept and self._ends[kept - 1] == (self._ends[kept - 2] if kept > 1 else 0):
            kept -= 1
        return kept
