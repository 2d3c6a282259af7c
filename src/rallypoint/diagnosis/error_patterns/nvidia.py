"""Words of NVIDIA's driver in the kernel's log: an Xid is the number of an error of a GPU."""

from __future__ import annotations

from rallypoint.diagnosis.pattern import Pattern

XID = Pattern(r"NVRM: Xid \(PCI:(?P<gpu>[\da-fA-F:.]+)\): (?P<xid>\d+)\b")

_MEMORY = "had an ECC error"
_LINK = "had an NVLink error"
_FIRMWARE = "had a firmware error (GSP)"
FAULTS = {
    **dict.fromkeys(("48", "92", "94", "95", "140", "171", "172"), _MEMORY),
    **dict.fromkeys(("74", "144", "145", "146", "147", "148", "149", "150"), _LINK),
    **dict.fromkeys(("38", "61", "62", "119", "120", "122", "123", "143"), _FIRMWARE),
    "54": "lacks auxiliary power",
    "79": "fell off the bus",
    "110": "had a security fault",
    "121": "had an error of its link to the processor (C2C)",
}
"""Faults of a GPU or of its machine, by their Xid as NVIDIA lists them. The others (13, 31, 43, 45
and more) are of the driver, or of programs themselves; 63 and 64 record that rows are remapped.
"""
