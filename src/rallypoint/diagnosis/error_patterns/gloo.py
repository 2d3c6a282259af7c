"""Texts of gloo about a failure, mostly through torch."""

from __future__ import annotations

import re

from rallypoint.diagnosis.pattern import Pattern

CAUSES = {
    "interface-missing": Pattern(r"Unable to find address for: (\S+)"),
    "sizes-differ": Pattern(r"op\.preamble\.length <= op\.nbytes\. (\d+) vs (\d+)"),
    "address-cut": Pattern(
        r"gloo/transport/tcp/address\.cc:\d+\] sizeof\(impl_\) == bytes\.size\(\)\. (\d+) vs (\d+)"
    ),
}

CHECKED = Pattern(r"(?:enforce fail at|EnforceNotMet)(?!.{0,400}SO_ERROR: )", re.DOTALL)
"""Texts of gloo about wrong data that arrived: that is no lost connection. Old gloo begins its text
about a lost connection in the same way, and ends it with the error of the socket.
"""

LOST = Pattern(
    r"This is typically caused by a remote worker"
    r"|pair\.cc:\d+\].{0,160}(closed|reset|refused|error|Broken pipe)"
    r"|Application timeout caused pair closure",
    re.IGNORECASE,
)
WAITED = Pattern(
    r"Timed out waiting \d+ ?ms|\.cc:\d+\].{0,160}(timed out connecting|Connect timeout)"
    r"|connect\(\) timed out\. Original",
    re.IGNORECASE,
)
ADDRESS_KEY = Pattern(r"/default_pg/\d+//\w+//\d+/(\d+)")
"""The key of torch's store under which a rank leaves its address for gloo."""
