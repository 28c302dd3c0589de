"""Which idle members a job gets: its trainers together on few hosts, its parameter servers on many."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping

from master_service.core.state.cluster import Place
from trireme_shared.protocol.records.cluster import PoolMember

Fits = Callable[[Place], bool]


class IdlePlaces:
    """Idle members of one kind, by host. Hosts are found by how many they have, in O(log hosts)."""

    def __init__(self, places: Iterable[Place], members: Mapping[Place, PoolMember]) -> None:
        self._hosts: dict[str, list[Place]] = defaultdict(list)
        for place in sorted(places, reverse=True):
            self._hosts[members[place].host].append(place)  # taken from the end: the first by name first
        self._aside: set[str] = set()
        self._by_count: dict[int, list[str]] = defaultdict(list)  # heaps; an entry counts if the host still has so many
        for host, there in self._hosts.items():
            self._by_count[len(there)].append(host)
        for hosts in self._by_count.values():
            heapq.heapify(hosts)

    def take_together(self, count: int, fits: Fits, hosts: Counter[str]) -> list[Place]:
        """At most `count`. `hosts`: how many the job has where: there first; then the host that has just enough, or most."""
        taken: list[Place] = []
        for host, _ in sorted(hosts.items(), key=lambda item: (-item[1], item[0])):
            taken += self._take(host, count - len(taken), fits)
        refused: list[str] = []
        while len(taken) < count and (host := self._best(count - len(taken))):
            found = self._take(host, count - len(taken), fits)
            taken += found
            if not found:
                refused.append(self._set_aside(host))
        self._put_back(refused)
        return taken

    def take_spread(self, count: int, fits: Fits, hosts: Counter[str]) -> list[Place]:
        """At most `count`. `hosts`: how many the job has where: others first, those that have most idle ones."""
        taken: list[Place] = []
        hosts, aside = Counter(hosts), []
        while len(taken) < count and (host := self._largest()):
            found = self._take(host, 1, fits) if host not in hosts else []
            taken += found
            hosts.update([host] if found else [])
            if self._hosts[host]:
                aside.append(self._set_aside(host))
        while len(taken) < count and aside:
            host = min(aside, key=lambda name: (hosts[name], -len(self._hosts[name]), name))
            found = self._take(host, 1, fits)
            taken += found
            hosts.update([host] if found else [])
            if not found or not self._hosts[host]:
                aside.remove(host)
                self._put_back([host])
        self._put_back(aside)
        return taken

    def _take(self, host: str, most: int, fits: Fits) -> list[Place]:
        there = self._hosts.get(host, [])
        taken: list[Place] = []
        for place in reversed(there):
            if len(taken) >= most:
                break
            if fits(place):
                taken.append(place)
        for place in taken:
            there.remove(place)
        if taken and there:
            heapq.heappush(self._by_count[len(there)], host)
        return taken

    def _first(self, count: int) -> str:
        """The first host by name that has exactly `count`; empty: there is none."""
        hosts = self._by_count[count]
        while hosts and (len(self._hosts[hosts[0]]) != count or hosts[0] in self._aside):
            heapq.heappop(hosts)
        if not hosts:
            del self._by_count[count]
        return hosts[0] if hosts else ""

    def _best(self, count: int) -> str:
        counts = sorted(self._by_count)
        for there in [*(n for n in counts if n >= count), *(n for n in reversed(counts) if n < count)]:
            if host := self._first(there):
                return host
        return ""

    def _largest(self) -> str:
        return next((host for there in sorted(self._by_count, reverse=True) if (host := self._first(there))), "")

    def _set_aside(self, host: str) -> str:
        """It is not found any more until it is put back."""
        self._aside.add(host)
        return host

    def _put_back(self, hosts: list[str]) -> None:
        for host in hosts:
            self._aside.discard(host)
            if self._hosts[host]:
                heapq.heappush(self._by_count[len(self._hosts[host])], host)
