"""The wording of all config problems, in one file: `python tests/config/test_messages.py` writes it. Other tests assert on keys
and rules, so that a sentence can be improved by changing it in the source and running this.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import hvdtrain

PACKAGE = Path(hvdtrain.__file__).parent
MESSAGES = Path(__file__).with_name("messages.txt")
MAKERS = {"problem": 2, "Problem.of": 2, "ConfigError.of": 2, "Mismatch": 2, "Rule": 1}
"""By the function that makes a problem, the number of its arguments that are texts."""


def template(node: ast.expr, texts: dict[str, str]) -> str:
    """A text as in the source, with what is inserted in braces.

    Args:
        texts: the constants of the file.
    """
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(template(part, texts) for part in node.values)
    if isinstance(node, ast.BinOp):
        return template(node.left, texts) + template(node.right, texts)
    inner = node.value if isinstance(node, ast.FormattedValue) else node
    name = inner.func.value if isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute) else inner
    return texts.get(ast.unparse(name), "{" + ast.unparse(inner) + "}")


def messages() -> Iterator[str]:
    """Of each call that makes a problem, file, rule and sentence."""
    for path in sorted(PACKAGE.rglob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        constants = [node for node in nodes if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)]
        texts = {ast.unparse(node.targets[0]): str(node.value.value) for node in constants if node.col_offset == 0}  # type: ignore[attr-defined]
        calls = [node for node in nodes if isinstance(node, ast.Call) and path.parent.name != "doctor"]
        makers = [(call, MAKERS.get(ast.unparse(call.func), 0)) for call in calls]
        found = {" | ".join(template(text, texts) for text in call.args[:count]) for call, count in makers if count}
        yield from (f"{path.relative_to(PACKAGE).as_posix()} | {line}" for line in sorted(found))


def test_the_wording_of_all_problems_is_as_reviewed() -> None:
    old, new = MESSAGES.read_text().splitlines(), list(messages())
    changed = [f"- {line}" for line in old if line not in new] + [f"+ {line}" for line in new if line not in old]
    assert old == new, "\n".join(["python tests/config/test_messages.py writes messages.txt. Changed:", *changed])


if __name__ == "__main__":
    MESSAGES.write_text("\n".join(messages()) + "\n")
