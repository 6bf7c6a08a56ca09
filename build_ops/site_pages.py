# SPDX-License-Identifier: Apache-2.0
"""A hook of mkdocs: CHANGELOG.md of the root as a page of the site."""

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the page. Its links begin with `docs/`, which is the site's root."""
    text = Path(config.docs_dir, "..", "CHANGELOG.md").read_text()
    page = text.replace("](docs/", "](")
    files.append(File.generated(config, "changelog.md", content=page))
    return files


def on_page_markdown(
    markdown: str, page: Page, config: MkDocsConfig, files: Files
) -> str:
    """Points links to the file in the repository at the page."""
    return markdown.replace("](../CHANGELOG.md", "](changelog.md")
