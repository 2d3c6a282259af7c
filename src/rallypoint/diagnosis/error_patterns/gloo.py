"""Texts of gloo about a failure, mostly through torch."""

from __future__ import annotations

import re

CAUSES = {
    "interface-missing": re.compile(r"Unable to find address for: (\S+)"),
    "sizes-differ": re.compile(r"op\.preamble\.length <= op\.nbytes\. (\d+) vs (\d+)"),
    "address-cut": re.compile(
        r"gloo/transport/tcp/address\.cc:\d+\] sizeof\(impl_\) == bytes\.size\(\)\. (\d+) vs (\d+)"
    ),
}

CHECKED = re.compile(r"enforce fail at|EnforceNotMet")
"""Texts of gloo about wrong data that arrived: that is no lost connection."""

LOST = re.compile(
    r"This is typically caused by a remote worker"
    r"|pair\.cc:\d+\].{0,160}(closed|reset|refused|error|Broken pipe)"
    r"|Application timeout caused pair closure",
    re.IGNORECASE,
)
WAITED = re.compile(
    r"Timed out waiting \d+ ?ms|\.cc:\d+\].{0,160}(timed out connecting|Connect timeout)"
    r"|connect\(\) timed out\. Original",
    re.IGNORECASE,
)
ADDRESS_KEY = re.compile(r"/default_pg/\d+//\w+//\d+/(\d+)")
"""The key of torch's store under which a rank leaves its address for gloo."""
