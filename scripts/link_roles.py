"""A hook of mkdocs: :func:`name` in docstrings becomes a link to that function in the reference.

A full name must be in the reference, or `mkdocs build --strict` fails. Another is looked for beside
the object whose docstring it is in, and stays plain code if it is not there.
"""

import re

ROLE = re.compile(r":(?:func|meth|class|mod):<code>([\w.]+)</code>")
HEADING = re.compile(r'<h\d id="(neginf[\w.]*)"')


def on_page_content(html, **_):
    headings = [(match.start(), match[1]) for match in HEADING.finditer(html)]

    def link(match):
        name, optional = match[1], ""
        if not name.startswith("neginf."):
            owner = [heading for start, heading in headings if start < match.start()][-1]
            name, optional = f"{owner.rpartition('.')[0]}.{name}", " optional"
        return f'<autoref identifier="{name}"{optional}><code>{match[1]}</code></autoref>'

    return ROLE.sub(link, html)
