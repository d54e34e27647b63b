"""Pages of the site that are generated: the options, the command line, the changes. Used by mkdocs (see mkdocs.yml)."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from mkdocs.structure.files import File, Files

from nsq_fast import config as options
from nsq_fast.cli import main
from nsq_fast.worker.settings import WorkerConfig

ROOT = Path(__file__).parent.parent
KINDS = "added", "changed", "removed", "fixed"
MARK = "<!-- changes/ goes here -->"
CONFIGS = {
    options.ConsumerConfig: "Consumer",
    options.ProducerConfig: "Producer",
    options.ConnectionConfig: "Connections (consumers and producers)",
    options.LookupConfig: "Lookup (consumers and producers)",
    WorkerConfig: "The worker (nsq-fast run)",
}


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages."""
    for name, content in (("options.md", option_page()), ("cli.md", cli_page()), ("changes.md", changes_page())):
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links to files of the repository that are no pages become their names."""
    outside = re.escape("../" * (page.file.src_uri.count("/") + 1))
    return re.sub(rf"\[([^\]]+)\]\({outside}[^)]+\)", r"`\1`", markdown)


def on_page_content(html: str, **_: Any) -> str:
    """A corner of a table without text is no header."""
    return re.sub(r"<th([^>]*)></th>", r"<td\1></td>", html)


def on_post_template(output_content: str, template_name: str, **_: Any) -> str:
    return on_post_page(output_content) if template_name.endswith(".html") else output_content


def on_post_page(output: str, **_: Any) -> str:
    """Long names may be broken in tables, between their words; and the theme is mended.

    Its search dialog has no name, and each group of the menu is a landmark: it is a part of one.
    """
    output = re.sub(r"<td.*?</td>", lambda cell: _CODE.sub(_breakable, cell[0]), output, flags=re.DOTALL)
    search = 'data-md-component="search" role="dialog"'
    output = output.replace(search, f'{search} aria-label="Search"')
    parts = re.split(r"(<nav [^>]*>|</nav>)", output)
    inner: list[bool] = []
    for at in range(1, len(parts), 2):
        if parts[at] != "</nav>":
            inner.append('data-md-level="' in parts[at] and 'data-md-level="0"' not in parts[at])
            if inner[-1]:
                parts[at] = parts[at].replace("<nav", '<div role="group"')
        elif inner.pop():
            parts[at] = "</div>"
    return "".join(parts)


_CODE = re.compile(r"(?<=<code>)[^<]+(?=</code>)")


def _breakable(name: re.Match[str]) -> str:
    """A name with places where a line may end: behind what joins its words."""
    return re.sub(r"(?<=\w)[_/.=:,-](?=\w)", r"\g<0><wbr>", name[0])


# Options


def option_page() -> str:
    """Every option, as it is declared in ``nsq_fast/config.py``."""
    parts = [
        "# Options\n\nKeyword arguments of `Consumer` and `Producer`, and the flags of [the worker](production.md). A"
        " wrong name, type or value raises `ConfigError` when the object is made. Numbers may be given as text. This"
        " page is generated from `nsq_fast/config.py`."
    ]
    for cls, title in CONFIGS.items():
        rows = [
            f"| `{field.name}` | {_default(field)} | {_allowed(field)} | {_text(field.metadata['doc'])} |"
            for field in dataclasses.fields(cls)
        ]
        parts.append(f"## {title}\n\n| option | default | allowed | meaning |\n|---|---|---|---|\n" + "\n".join(rows))
    return "\n\n".join(parts) + "\n"


def _default(field: dataclasses.Field[Any]) -> str:
    value, unit = field.default, field.metadata["unit"]
    return f"`{value}`" + (f" {unit}" if unit and value is not None else "")


def _allowed(field: dataclasses.Field[Any]) -> str:
    meta = field.metadata
    low, high = meta["minimum"], meta["maximum"]
    if low is None and high is None:
        return {bool: "true, false", str: "text"}.get(meta["kind"], "")
    bounds = f"{_number(low)} to {_number(high)}" if high is not None else f"at least {_number(low)}"
    return bounds + "".join(f", or {each}" for each in meta["also"])


def _number(value: float) -> str:
    return f"{int(value):,}" if value == int(value) else f"{value:,}"


def _text(doc: str) -> str:
    return doc.replace("|", "\\|")


# Command line


def cli_page() -> str:
    """What ``nsq-fast COMMAND --help`` says, for every command."""
    parts = [
        "# Command line\n\nWhat each command says with `--help`. `python -m nsq_fast` is the same as `nsq-fast`.\n\n"
        "Shells complete commands, options and their values once this stands in `~/.bashrc`, with `zsh` for `bash` in"
        " `~/.zshrc`; for fish it is the line below, in `~/.config/fish/config.fish`:\n\n"
        "```sh\n"
        'eval "$(_NSQ_FAST_COMPLETE=bash_source nsq-fast)"\n'
        "_NSQ_FAST_COMPLETE=fish_source nsq-fast | source\n"
        "```"
    ]
    with click.Context(main, info_name="nsq-fast", max_content_width=100) as context:
        parts += [
            f"{'#' * min(depth + 1, 4)} {name}\n\n```text\n{text}\n```"
            for depth, name, text in _commands(main, context)
        ]
    return "\n\n".join(parts) + "\n"


def _commands(command: click.Command, context: click.Context, depth: int = 1) -> Iterator[tuple[int, str, str]]:
    yield depth, context.command_path, command.get_help(context)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            if inner is not None and not inner.hidden:
                with click.Context(inner, info_name=name, parent=context, max_content_width=100) as deeper:
                    yield from _commands(inner, deeper, depth + 1)


def changes_page() -> str:
    """CHANGELOG.md, with what stands in changes/ below the version that is unreleased."""
    found = [f"### {kind.title()}\n\n{texts}" for kind in KINDS if (texts := _changes(kind))]
    return (ROOT / "CHANGELOG.md").read_text().replace(MARK, "\n\n".join(found))


def _changes(kind: str) -> str:
    return "\n".join(f"- {path.read_text().strip()}" for path in sorted((ROOT / "changes").glob(f"*.{kind}.md")))
