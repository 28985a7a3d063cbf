"""The wording of all config problems, in one file: `python tests/config/test_messages.py` writes it. Other tests assert on keys
and rules, so that a sentence can be improved by changing it in the source and running this. It also writes the messages into
docs/messages.md, after each marker there.
"""

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import hvdtrain

PACKAGE = Path(hvdtrain.__file__).parent
MESSAGES = Path(__file__).with_name("messages.txt")
PAGE = Path(__file__).parents[2] / "docs" / "messages.md"
MAKERS = {"problem": 2, "Problem.of": 2, "ConfigError.of": 2, "Mismatch": 2, "Rule": 1}
"""By the function that makes a problem, the number of its arguments that are texts."""


MARKER = re.compile(r"^<!-- (?P<patterns>.*) -->\n(?P<list>(?:\n- .*\n(?:- .*\n)*)?)", re.MULTILINE)
"""On the page, in front of the messages of a section: which ones, as `FILE: RULE, RULE; FILE: *`. (rule) stands for texts that
follow "expected" in messages of any key."""


@dataclass(frozen=True)
class Message:
    """A call that makes a problem.

    Attributes:
        file: its file in the package.
        texts: its rule and its sentence, or only what is expected. is_rule: whether it is the latter.
        shown: the sentence for the page, with … for everything that is inserted.
    """

    file: str
    texts: tuple[str, ...]
    is_rule: bool
    shown: str

    def __str__(self) -> str:
        return " | ".join((self.file, *self.texts))

    def is_meant(self, patterns: str) -> bool:
        """Whether a marker's patterns name it.

        >>> Message("data/keys.py", ("missing", "files: ..."), False, "").is_meant("config/*: *; data/*: conflict, missing")
        True
        """
        rule = "(rule)" if self.is_rule else self.texts[0]
        for pattern in patterns.split("; "):
            file, _, rules = pattern.partition(": ")
            if fnmatch(self.file, file) and (rule in rules.split(", ") or (rules == "*" and not self.is_rule)):
                return True
        return False


def template(node: ast.expr, texts: dict[str, str], inserted: Callable[[str], str] = "{{{}}}".format) -> str:
    """A text as in the source, with what is inserted in braces.

    Args:
        texts: the constants of the file.
        inserted: what stands for an expression that is inserted.
    """
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(template(part, texts, inserted) for part in node.values)
    if isinstance(node, ast.BinOp):
        return template(node.left, texts, inserted) + template(node.right, texts, inserted)
    inner = node.value if isinstance(node, ast.FormattedValue) else node
    name = inner.func.value if isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute) else inner
    return texts.get(ast.unparse(name)) or inserted(ast.unparse(inner))


@cache
def messages() -> list[Message]:
    """Of each call that makes a problem, file, rule and sentence."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        constants = [node for node in nodes if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)]
        texts = {ast.unparse(node.targets[0]): str(node.value.value) for node in constants if node.col_offset == 0}  # type: ignore[attr-defined]
        calls = [node for node in nodes if isinstance(node, ast.Call) and path.parent.name != "doctor"]
        makers = [(call, MAKERS.get(ast.unparse(call.func), 0)) for call in calls]
        file = path.relative_to(PACKAGE).as_posix()
        of_file = {message_of(file, call, call.args[:count], texts) for call, count in makers if count}
        found += sorted(of_file, key=str)
    return found


def message_of(file: str, call: ast.Call, arguments: list[ast.expr], texts: dict[str, str]) -> Message:
    """The message that a call makes."""
    is_rule = ast.unparse(call.func) in ("Mismatch", "Rule")
    sentence = arguments[0] if is_rule else arguments[-1]
    shown = re.sub(r"…(?:…|'…'|, …)*", "…", template(sentence, texts, lambda _: "…"))
    return Message(file, tuple(template(text, texts) for text in arguments), is_rule, shown)


def filled(page: str) -> str:
    """The page with the messages of each section."""

    def list_of(found: re.Match[str]) -> str:
        meant = [message.shown for message in messages() if message.is_meant(found["patterns"])]
        shown = [text for text in meant if re.search(r"\w", text)]
        lines = "".join(f"- `` {text} ``\n" if "`" in text else f"- `{text}`\n" for text in dict.fromkeys(shown))
        return f"<!-- {found['patterns']} -->\n\n{lines}"

    return MARKER.sub(list_of, page)


def test_the_wording_of_all_problems_is_as_reviewed() -> None:
    old, new = MESSAGES.read_text().splitlines(), [str(message) for message in messages()]
    changed = [f"- {line}" for line in old if line not in new] + [f"+ {line}" for line in new if line not in old]
    assert old == new, "\n".join(["python tests/config/test_messages.py writes messages.txt. Changed:", *changed])


def test_every_message_has_its_cause_and_its_cure_on_a_page() -> None:
    """In one section of docs/messages.md, whose words a reader can search for."""
    page = PAGE.read_text()
    patterns = [found["patterns"] for found in MARKER.finditer(page)]
    for message in messages():
        meant = [pattern for pattern in patterns if message.is_meant(pattern)]
        assert len(meant) == 1, f"{message}: expected in one section of docs/messages.md (<!-- FILE: RULE -->), got {meant}"
    for pattern in patterns:
        assert any(message.is_meant(pattern) for message in messages()), f"docs/messages.md: no message is meant by {pattern}"
    sections = re.split(r"^##+ ", page.partition("\n## ")[2], flags=re.MULTILINE)
    for section in sections:
        if "<!-- " in section:
            found = re.search(r"^\*\*Cause\.\*\* \S.*^\*\*Cure\.\*\* \S", section, re.MULTILINE | re.DOTALL)
            assert found, section.splitlines()[0]
    assert page == filled(page), "python tests/config/test_messages.py writes the lists of docs/messages.md"


if __name__ == "__main__":
    MESSAGES.write_text("".join(f"{message}\n" for message in messages()))
    PAGE.write_text(filled(PAGE.read_text()))
