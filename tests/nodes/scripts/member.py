"""member.py HOST PORT SECRET TTL [lead]: a member of a job as a node's agent is, without a job.

Prints what it learns, with the moment (CLOCK_MONOTONIC, which all nodes of this machine share):
`joined`, `here NAME` and `gone NAME` of each node (only the lead), `alone UNTIL` when others may take
it for dead: until when it knew that they do not. The lead serves the store as well.
"""

import socket
import sys
import threading
import time

from rallypoint import ABSENT
from rallypoint.store.client.member import Member
from rallypoint.store.server.server import Server


def say(*words):
    print(*words, time.monotonic(), flush=True)


def watch_itself(member):
    until = 0.0
    while (left := member.left) > 0.0:
        until = time.monotonic() + left
        time.sleep(0.005)
    say("alone", until)


host, port, secret, ttl = sys.argv[1], int(sys.argv[2]), bytes.fromhex(sys.argv[3]), float(sys.argv[4])
lead = sys.argv[5:] == ["lead"]
if lead:
    listener = socket.create_server((host, port))
    Server(listeners=[listener], secret=secret, job="job7", local=False).start()
member = Member.join([(host, port)], secret, job="job7", ttl=ttl, timeout=60.0)
changes = member.watch("node/" if lead else "word/")
for key, _ in member.items("node/") if lead else ():
    say("here", key.removeprefix("node/"))
member.set(f"node/{socket.gethostname()}", b"here", ephemeral=True)
say("joined")
threading.Thread(target=watch_itself, args=[member]).start()
try:
    for change in changes:
        say("gone" if change.value is ABSENT else "here", change.key.removeprefix("node/"))
except ConnectionError:
    say("over")
