"""The search of the built site (``make docs``), opened from disk: it finds every text of an error."""

import random
import re

import pytest

from docs.messages import SOURCE, messages
from tests.helpers import ROOT
from tests.view.browser import errors, start_browser, wait_for

SITE = ROOT / "build" / "site"
FOUND = "[...document.querySelectorAll('.md-search-result__link')].some(link => link.href.includes('errors.html'))"
MORE = "(document.querySelector('.md-search__scrollwrap').scrollTop += 9999, true)"  # results are shown as one scrolls
NEWEST = max(path.stat().st_mtime for path in SOURCE.rglob("*.py"))
BUILT = SITE.exists() and (SITE / "index.html").stat().st_mtime > NEWEST
pytestmark = pytest.mark.skipif(not BUILT, reason="no site, or one older than the sources: make docs builds it")


def words_of(text):
    """Of the longest part without values."""
    return re.findall(r"[a-z]{4,}", max(text.split("..."), key=len))


def test_every_word_of_an_error_is_on_its_page_and_in_the_index():
    index = (SITE / "search" / "search_index.json").read_text()
    page = (SITE / "reference" / "errors.html").read_text()
    assert all(word in page and word in index for _, text in messages() for word in words_of(text))


def test_the_search_finds_an_error_by_its_words():
    texts = sorted({text for _, text in messages() if len(set(words_of(text))) > 3})
    index = (SITE / "search" / "search_index.json").read_text()
    with start_browser() as browser:
        browser.get((SITE / "index.html").as_uri())
        box = browser.find_element("css selector", "input.md-search__input")
        browser.execute_script("document.getElementById('__search').click()")
        for text in random.Random(0).sample(texts, 5):
            box.clear()
            box.send_keys(" ".join(sorted(set(words_of(text)), key=index.count)[:3]))  # those that say the most
            wait_for(browser, f"{MORE} && {FOUND}")
        assert errors(browser) == []
