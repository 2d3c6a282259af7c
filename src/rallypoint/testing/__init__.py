"""For tests, ours and yours: a clock you move, connections you cut, faults by name."""

from rallypoint.testing.clock import ManualClock
from rallypoint.testing.engine import ProxyStatistics, Traffic
from rallypoint.testing.faults import Fault, Faults, ListenerFaults
from rallypoint.testing.network import Network
from rallypoint.testing.proxy import ChaosProxy, ProxiedConnection

__all__ = ["ChaosProxy", "Fault", "Faults", "ListenerFaults", "ManualClock", "Network", "ProxiedConnection", "ProxyStatistics", "Traffic"]
