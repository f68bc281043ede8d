"""The one page a person wants to read: what a study found, as a file that needs nothing but a browser.

    findings --charts, tables--> report.html     and every number as findings.json, cells.csv, curves.csv, fits.csv

`page` lays it out, `charts`, `growth` and `training` draw, `tables` lists, `words` writes numbers as people do and
escapes what strangers wrote, `files` puts all on disk. Colours live in style.css alone: a chart names a colour
(`--ink`), page.js looks it up, and so one chart serves a light page, a dark one and a printed one.
"""

from trimtab.report.page import write_report

__all__ = ["write_report"]
