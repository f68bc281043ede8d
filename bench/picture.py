"""A picture of a report, for a README: from the headline to the first charts.

    python -m bench.picture runs/lab/report.html docs/figures/lab.png

It takes Debian's chromium (`apt-get install chromium`), and as sharp a picture as fits into LARGEST bytes.
"""

import shutil
from pathlib import Path
from typing import Any

import tyro

from trimtab.hints import load_extra

LARGEST = 400_000  # bytes
WIDTH = 1120  # CSS pixels
SHORT = "nav, .notes, .verdict li:nth-child(n + 5) { display: none !important; }"  # a picture has no links
SHARPNESS = (2.0, 1.5, 1.0)  # pixels per CSS pixel


def take_picture(page: Path, out: Path, /, *, until: str = "#learning-rates .panels", dark: bool = False) -> Path:
    """Draw the page from its top to the end of the element `until` and write it as PNG."""
    if not page.is_file():
        raise ValueError(f"{page} is no page; `trimtab report DIR` makes one")
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        raise ValueError("a picture needs a browser and there is none; `apt-get install chromium` gets one")
    driver = load_extra("playwright.sync_api", extra="dev", purpose="a picture of the report")
    with driver.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        for scale in SHARPNESS:
            image = _draw(chromium, page, until, scale, dark)
            if len(image) <= LARGEST:
                break
        chromium.close()
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(image)
    return out


def _draw(chromium: Any, page: Path, until: str, scale: float, dark: bool) -> bytes:
    scheme = "dark" if dark else "light"
    size = {"width": WIDTH, "height": 900}
    tab = chromium.new_page(viewport=size, device_scale_factor=scale, color_scheme=scheme)
    tab.goto(page.absolute().as_uri())
    tab.wait_for_selector("html[data-drawn]", state="attached")
    tab.add_style_tag(content=SHORT)
    box = tab.locator(until).first.bounding_box()
    end = box["y"] + box["height"] + 12
    image: bytes = tab.screenshot(full_page=True, clip={"x": 0, "y": 0, "width": WIDTH, "height": end})
    tab.close()
    return image


if __name__ == "__main__":
    tyro.cli(take_picture)
