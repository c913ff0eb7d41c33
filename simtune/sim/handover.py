"""Handover of requests from prefill to decode cores, with the transfer of their KV caches.

A request whose prompt is done on a prefill core is handed to a decode core at once, but its KV cache stays on the
prefill core until the decode core has reserved a seat and blocks for it, first come first served. Then the KV cache is
sent, and its blocks are freed when the last byte has been sent. So a full decode pool fills the prefill pool. The first
token is delivered when the prompt is done, or by the decode core: when the KV cache has arrived, or with the decode
core's first step, which then samples that token again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from simtune.engine import Request
from simtune.sim.agenda import DRAINED, TRANSFER_END, Agenda
from simtune.sim.core import EngineCore, KvTransfer
from simtune.sim.link import TransferLink
from simtune.sim.recorder import Recorder
from simtune.sim.router import Router
from simtune.sim.source import RequestSource
from simtune.specs.plan import FirstToken


class Routers(NamedTuple):
    """Routers of a deployment."""

    front: Router
    """Router among the cores that accept new requests."""
    back: Router
    """Router among the cores that only decode, if there are any."""

    @property
    def informed(self) -> bool:
        """True if a router is informed of requests that are over, or a server counts those in flight."""
        return self.front.informed or self.back.informed or self.limited

    @property
    def limited(self) -> bool:
        """True if a server may reject requests."""
        return any(core.admission is not None for core in self.front.cores)

    def over(self, now: int, request: Request, core: EngineCore) -> None:
        """Inform the router that sent a request to a core that the request is no longer there: finished, rejected, or
        lost with the core."""
        if core.admission is not None:
            core.admission.over(request.id)
        router = self.back if self.back.cores and core.connector is None else self.front
        router.over(request, core, now)


class Handover:
    """All requests on their way from prefill to decode cores."""

    def __init__(
        self,
        agenda: Agenda,
        recorder: Recorder,
        source: RequestSource,
        routers: Routers,
        cores: Iterable[EngineCore],
        first_token: FirstToken = "prefill",
        names_blocks: bool = False,
    ) -> None:
        """Create the handover; `cores` are all cores of the deployment, `first_token` is the source of the client's
        first token. With `names_blocks` prefix caches of decode cores find the prompts that were sent to them."""
        self.first_token, self._names_blocks = first_token, names_blocks
        self._agenda, self._recorder, self._source = agenda, recorder, source
        self._routers, self._router = routers, routers.back
        self._transfers: dict[int, KvTransfer] = {}  # by request
        self._unroutable: list[KvTransfer] = []  # no decode core is up
        self._serial = 0
        connectors = (core.connector for core in cores if core.connector is not None)
        self._links = {link.number: link for connector in connectors for link in connector.links}
        # The shortest of all: the router may send a request to any of them.
        self._longest = min((core.scheduler.max_model_len for core in routers.back.cores), default=0)

    def fits(self, number: int) -> bool:
        """True if every decode core can hold the whole request."""
        return self._source.tokens_of(number) <= self._longest

    def take(self, now: int, core: EngineCore, held: Request) -> bool:
        """Hand a request whose prompt is done to a decode core; return False if the request is complete already."""
        request = self._source.rest_of(held, resampled=self.first_token == "decode")
        if self.first_token != "prefill" and self._recorder.first_token[held.id] < 0:
            # Only the prompt that led to the first token counts, not one recomputed later.
            self._recorder.prefilled[held.id] = now
        if request is None:
            self._delivered(now, held.id)
            core.scheduler.release(held)
            return False
        if self._names_blocks:
            request.blocks = held.blocks
        transfer = KvTransfer(request, core, held, now, self._next_serial())
        self._transfers[request.id] = transfer
        core.holding += 1
        self._recorder.waiting += 1
        self.offer(now, transfer)
        return True

    def offer(self, now: int, transfer: KvTransfer) -> None:
        """Queue a transfer at a decode core, or keep it until one is up."""
        transfer.target = target = self._router.choose(transfer.request, now)
        if target is None:
            self._unroutable.append(transfer)
            if transfer.source.draining:
                # The instance leaves, and may be the only one that could become a decode instance.
                self._agenda.post((now, DRAINED, transfer.source.number, 0))
            return
        self._recorder.core[transfer.request.id] = target.number
        target.offer(now, transfer)

    def offer_unroutable(self, now: int) -> None:
        """Offer the transfers that waited for a decode core, after cores have come up."""
        unroutable, self._unroutable = self._unroutable, []
        for transfer in unroutable:
            self.offer(now, transfer)

    def unroutable(self, core: EngineCore) -> list[KvTransfer]:
        """Return the transfers from a prefill core for which no decode core is up."""
        return [transfer for transfer in self._unroutable if transfer.source is core]

    # --- transfers --------------------------------------------------------------------------------------------

    def start(self, now: int, number: int, serial: int) -> None:
        """Start sending a request's KV cache."""
        transfer = self._transfers.get(number)
        if transfer is None or transfer.serial != serial:
            # The transfer was cancelled, and may have begun anew with another serial number.
            return
        # Layer by layer a cache may be sent from the first step of its prompt on.
        computing = transfer.ready - self._recorder.scheduled[number]
        link = transfer.connector.link
        link.join(now, number, transfer.connector.left_to_send(transfer.blocks, computing))
        self._announce(link)

    def end(self, now: int, number: int, version: int) -> None:
        """End the transfers whose last byte has arrived over link `number`."""
        link = self._links[number]
        if link.version != version:
            # Transfers came or went since, which changed the rates of all; a later event has the new end.
            return
        for request in link.ended(now):
            transfer = self._transfers.pop(request)
            source, target = transfer.source, transfer.target
            assert target is not None
            self._recorder.transferred_bytes += transfer.blocks * transfer.connector.block_bytes
            if self._recorder.transferred[request] < 0 or self._recorder.first_token[request] < 0:
                # Keep the first transfer, unless the request was lost before its first token and had to be sent again.
                self._recorder.transferred[request] = now
            if transfer.request.emitted:
                self._delivered(now, request)
            # The prefill core holds its blocks until the last byte is sent, so a full decode pool fills the prefill
            # pool.
            source.scheduler.release(transfer.held)
            source.holding -= 1
            source.notify(now)
            target.inbox.arrived.append(transfer.request)
            target.notify(now)
        self._announce(link)

    def _delivered(self, now: int, number: int) -> None:
        """Record the delivery of a request's first token, unless it was delivered before."""
        if self._recorder.first_token[number] < 0:
            self._recorder.first_token[number] = now

    def _announce(self, link: TransferLink) -> None:
        end = link.next_end()
        if end is not None:
            self._agenda.post((end, TRANSFER_END, link.number, link.version))

    def _next_serial(self) -> int:
        self._serial += 1
        return self._serial

    # --- cores go ---------------------------------------------------------------------------------------------

    def withdraw(self, now: int, core: EngineCore) -> None:
        """Offer the transfers that wait for room at a decode core to other cores, because it accepts no more."""
        waiting = list(core.inbox.waiting)
        core.inbox.waiting.clear()
        for transfer in waiting:
            self._routers.over(now, transfer.request, core)
            self.offer(now, transfer)

    def drop_unroutable(self, now: int, core: EngineCore) -> list[Request]:
        """Cancel the transfers from a prefill core for which no decode core is up, and free their blocks. Return their
        requests."""
        transfers = self.unroutable(core)
        for transfer in transfers:
            self._cancel(now, transfer)
            core.scheduler.release(transfer.held)
            core.holding -= 1
        return [transfer.request for transfer in transfers]

    def fail_source(self, now: int, core: EngineCore) -> list[Request]:
        """Cancel the transfers of a prefill core that is lost with its KV caches. Returns their requests."""
        lost = [transfer for transfer in self._transfers.values() if transfer.source is core]
        for transfer in lost:
            self._cancel(now, transfer)
        core.holding = 0
        return [transfer.request for transfer in lost]

    def fail_target(self, now: int, core: EngineCore) -> list[KvTransfer]:
        """Return the transfers to a decode core that is lost, to be offered to others; their KV caches stay at the
        source."""
        coming = [transfer for transfer in self._transfers.values() if transfer.target is core]
        for transfer in coming:
            self._routers.over(now, transfer.request, core)
            if transfer.sending:
                self._stop(now, transfer)
                self._recorder.waiting += 1
        core.inbox.waiting.clear()
        core.inbox.arrived.clear()
        # The sources of dropped requests failed before, and the requests were resubmitted then.
        core.inbox.release_dropped(core.scheduler)
        return coming

    def _cancel(self, now: int, transfer: KvTransfer) -> None:
        """Cancel a transfer whose KV cache will never arrive."""
        del self._transfers[transfer.request.id]
        # The request is computed again, and a prefix cache finds its prompt by these.
        transfer.request.blocks = transfer.held.blocks
        target = transfer.target
        if target is not None:
            self._routers.over(now, transfer.request, target)
        if target is not None and transfer.sending:
            self._stop(now, transfer)
            target.inbox.dropped.append(transfer.request)
            target.notify(now)
            return
        self._recorder.waiting -= 1
        if target is None:
            self._unroutable.remove(transfer)
        else:
            target.inbox.waiting.remove(transfer)
            # The transfers behind it may fit now.
            target.notify(now)

    def _stop(self, now: int, transfer: KvTransfer) -> None:
        """Remove a KV cache from its link; the transfer may begin anew."""
        transfer.sending = False
        # An event that was posted to begin the transfer finds another number, and does nothing.
        transfer.serial = self._next_serial()
        link = transfer.connector.link
        if transfer.request.id in link:
            link.cancel(now, transfer.request.id)
            self._announce(link)
