"""The site's search, which also finds numbers: "64 H100", "405".

Sphinx leaves numbers out of its index, and its script skips them in a query. Here both sides write
a whole number as a word: 64 is `number64`.
"""

from __future__ import annotations

import re

from sphinx.search.en import SearchEnglish

NUMBER = r"^\d{1,4}$"  # longer ones are sizes in bytes, which nobody looks up
SPLIT = r"""
var splitQuery = (query) =>
  query.split(/[^\p{Letter}\p{Number}_\p{Emoji_Presentation}]+/gu)
    .filter((term) => term)
    .map((term) => term.replace(/%s/, "number$&"));
"""


class SearchWithNumbers(SearchEnglish):
    """English, with whole numbers of up to four digits."""

    js_splitter_code = SPLIT % NUMBER

    def split(self, input: str) -> list[str]:
        """Return the words of a text."""
        return [re.sub(NUMBER, r"number\g<0>", word) for word in super().split(input)]
