"""The table of environment variables and its documentation."""

import ast
from pathlib import Path

import pytest

from deepinfer_vllm import envs


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in envs.TABLE:
        monkeypatch.delenv(name, raising=False)


def test_defaults() -> None:
    assert envs.DEEPINFER_VLLM_MODEL == "auto"
    assert envs.DEEPINFER_VLLM_DECODER_REPLAY is True
    assert envs.DEEPINFER_VLLM_NUMERICS == "plain"


def test_read_at_access(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPINFER_VLLM_MODEL", "portable")
    monkeypatch.setenv("DEEPINFER_VLLM_DECODER_REPLAY", "0")
    assert envs.DEEPINFER_VLLM_MODEL == "portable"
    assert envs.DEEPINFER_VLLM_DECODER_REPLAY is False
    monkeypatch.setenv("DEEPINFER_VLLM_MODEL", "upstream")
    assert envs.DEEPINFER_VLLM_MODEL == "upstream"


def test_empty_means_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPINFER_VLLM_NUMERICS", "")
    assert envs.DEEPINFER_VLLM_NUMERICS == "plain"


@pytest.mark.parametrize(
    ("name", "text", "allowed"),
    [
        ("DEEPINFER_VLLM_MODEL", "cuda", "auto or portable or upstream"),
        ("DEEPINFER_VLLM_DECODER_REPLAY", "yes", "1 or 0"),
        ("DEEPINFER_VLLM_NUMERICS", "QAT", "plain or qat"),
    ],
)
def test_bad_value_names_variable_value_allowed_and_remedy(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str, allowed: str
) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(ValueError) as error:
        getattr(envs, name)
    message = str(error.value)
    assert message.startswith(f"{name}={text!r}") and allowed in message and f"unset {name}" in message


def test_every_default_is_allowed() -> None:
    for variable in envs.TABLE.values():
        variable.parse(variable.default)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="DEEPINFER_VLLM_MODLE"):
        _ = envs.DEEPINFER_VLLM_MODLE


def test_every_variable_is_typed_and_none_besides() -> None:
    module = ast.parse(Path(envs.__file__).read_text())
    block = next(node for node in module.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    typed = [ast.unparse(node.target) for node in block.body if isinstance(node, ast.AnnAssign)]
    assert typed == list(envs.TABLE)


def test_documentation_holds_exactly_this_table(root: Path) -> None:
    page = (root / "docs" / "configuration.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("|")]
    assert "\n".join(rows) == envs.markdown_table(), "put `python -m deepinfer_vllm.envs` into docs/configuration.md"


def test_no_variable_is_read_past_the_table(root: Path) -> None:
    """Whatever the package names DEEPINFER_VLLM_* is in the table."""
    names = {
        node.value
        for file in (root / "deepinfer_vllm").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("DEEPINFER_VLLM_")
    }
    assert {name for name in names if name.isidentifier()} <= set(envs.TABLE)
