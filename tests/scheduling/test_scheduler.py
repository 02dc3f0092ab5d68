"""The scheduler with a stand-in for the device: invariants after every step of random runs, and single cases."""

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.request import Request, RequestStatus, SamplingParams
from jaxserve.scheduling.plan import StepPlan
from jaxserve.scheduling.scheduler import Scheduler

PARAMS = SamplingParams()


def make_request(name: str, num_prompt: int, num_new: int, first: int = 0, **options) -> Request:
    return Request(name, [first, *range(1, num_prompt)], PARAMS, num_prompt + num_new, **options)


@dataclass
class Device:
    """Runs plans one step late, as the engine does. A request's token number i is 1000 + i.

    Attributes:
      cached: how many of a request's tokens are in its blocks.
      content: of each slot of each block, all tokens up to the one whose key and value lie there.
    """

    scheduler: Scheduler
    overlap: bool = True
    ahead: StepPlan | None = None
    cached: dict[Request, int] = field(default_factory=dict)
    content: dict[tuple[int, int], int] = field(default_factory=dict)

    def step(self) -> StepPlan:
        plan = self.scheduler.schedule()
        self.check(plan)
        ready, self.ahead = (self.ahead, plan) if self.overlap else (plan, None)
        if ready is not None:
            self.read(ready)
        self.scheduler.check_integrity()
        return plan

    def check(self, plan: StepPlan) -> None:
        assert plan.num_tokens <= self.scheduler.max_num_batched_tokens
        assert len(self.scheduler.running) <= len(self.scheduler.block_tables)
        for victim in plan.preempted:
            self.cached[victim] = 0
        rows = plan.rows()
        assert len(rows) == len(set(rows)), "a request is twice in a step"
        spans = [(r, p, 1) for r, p in zip(plan.decodes, plan.positions, strict=True)]
        spans += [(c.request, c.start, c.num_tokens) for c in plan.chunks]
        for chunk in plan.chunks:
            if chunk.enters:
                assert chunk.start % self.scheduler.block_size == 0
                self.cached[chunk.request] = chunk.start
        for request, start, count in spans:
            assert request.status is RequestStatus.RUNNING
            assert start == self.cached.get(request, 0), "computes what is cached, or leaves a gap"
            assert start + count <= len(request.block_ids) * self.scheduler.block_size, "writes outside its blocks"
            self.cached[request] = start + count
        self.write_and_read(spans)
        for chunk in plan.chunks:
            assert chunk.samples == (self.cached[chunk.request] == chunk.request.num_tokens)

    def write_and_read(self, spans: list[tuple[Request, int, int]]) -> None:
        """As a layer does: first all keys of the step are written, then every query reads its sequence's."""
        size = self.scheduler.block_size
        places = {}
        for request, start, count in spans:
            tokens = request.prompt_token_ids + [1000 + i for i in range(64)]
            prefixes, prefix = [], hash(request.cache_salt)
            for token in tokens[: start + count]:
                prefix = hash((prefix, token))
                prefixes.append(prefix)
            places[request] = [((request.block_ids[i // size], i % size), prefix) for i, prefix in enumerate(prefixes)]
            for place, prefix in places[request][start:]:
                self.content[place] = prefix
        for request, wanted in places.items():
            for place, prefix in wanted:
                assert self.content[place] == prefix, f"{request.request_id} reads another text's keys"

    def read(self, plan: StepPlan) -> None:
        for request in plan.decodes + [c.request for c in plan.chunks if c.samples]:
            request.num_inflight -= 1
            if request.status is RequestStatus.FINISHED:
                continue
            request.append(1000 + len(request.output_token_ids))
            if request.num_tokens >= request.max_total_tokens:
                self.scheduler.finish(request)


requests_strategy = st.lists(
    st.tuples(st.integers(1, 20), st.integers(1, 12), st.booleans(), st.integers(0, 8), st.integers(0, 1),
              st.sampled_from([None, None, "salt"])), min_size=1, max_size=12)


@settings(max_examples=300, deadline=None)
@given(requests_strategy, st.integers(9, 20), st.integers(1, 4), st.integers(4, 24), st.booleans(), st.booleans(),
       st.data())
def test_random_runs_keep_all_invariants_and_end(specs, num_blocks, max_num_seqs, budget, overlap, caching, data):
    scheduler = Scheduler(num_blocks=num_blocks, block_size=4, max_num_seqs=max_num_seqs,
                          max_num_batched_tokens=max(budget, max_num_seqs), max_blocks_per_seq=8,
                          enable_prefix_caching=caching)
    device = Device(scheduler, overlap)
    pending = [(make_request(str(i), prompt, new, first, needs_host_tokens=sync, cache_salt=salt), delay)
               for i, (prompt, new, sync, delay, first, salt) in enumerate(specs)]
    aborted = set()
    for step in range(1000):
        for request, delay in pending:
            if delay == step:
                scheduler.add(request)
        if data.draw(st.integers(0, 19)) == 0 and scheduler.has_requests:
            victim = data.draw(st.sampled_from(list(scheduler.requests())))
            scheduler.finish(victim)
            aborted.add(victim)
            scheduler.check_integrity()
        device.step()
        if step > 8 and not scheduler.has_requests:
            break
    assert not scheduler.has_requests, "requests are stuck"
    for request, _ in pending:
        assert request.status is RequestStatus.FINISHED
        if request not in aborted:
            num_new = request.max_total_tokens - request.num_prompt_tokens
            assert request.output_token_ids == [1000 + i for i in range(num_new)], "tokens lost or doubled"
    assert scheduler.pool.num_free == num_blocks - 1


def small(**options) -> Scheduler:
    defaults = dict(num_blocks=9, block_size=4, max_num_seqs=4, max_num_batched_tokens=16, max_blocks_per_seq=16)
    return Scheduler(**(defaults | options))


def test_prompts_are_cut_to_the_budget_and_decodes_go_first():
    scheduler = small(num_blocks=40)
    device = Device(scheduler, overlap=False)
    short, long = make_request("short", 3, 20), make_request("long", 40, 5)
    scheduler.add(short)
    device.step()
    scheduler.add(long)
    sizes = []
    while long.num_computed_tokens < 40:
        plan = device.step()
        assert plan.decodes == [short]
        sizes.append([chunk.num_tokens for chunk in plan.chunks])
    assert sizes == [[15], [15], [10]]


def test_the_newest_is_preempted_and_computes_everything_again():
    scheduler = small(num_blocks=7)
    device = Device(scheduler)
    old, new = make_request("old", 8, 10), make_request("new", 8, 10)
    scheduler.add(old)
    scheduler.add(new)
    while scheduler.has_requests:
        device.step()
    assert old.num_preemptions == 0 and new.num_preemptions > 0
    assert len(new.output_token_ids) == len(old.output_token_ids) == 10


def test_a_preempted_request_waits_for_its_token_in_flight():
    scheduler = small(num_blocks=7)
    device = Device(scheduler)
    old, new = make_request("old", 8, 10), make_request("new", 8, 10)
    scheduler.add(old)
    scheduler.add(new)
    while not new.num_preemptions:
        plan = device.step()
    assert plan.preempted == [new] and new.status is RequestStatus.WAITING
    assert new.num_inflight == 0, "the token in flight was read after the preemption"
    assert new.num_tokens == old.num_tokens


def test_one_request_may_fill_the_whole_pool():
    scheduler = small(num_blocks=9)
    device = Device(scheduler)
    alone = make_request("alone", 5, 28)  # 33 tokens, the last of which needs no room: 32 = 8 blocks
    scheduler.add(alone)
    for _ in range(60):
        device.step()
    assert alone.status is RequestStatus.FINISHED and len(alone.output_token_ids) == 28
    assert alone.num_preemptions == 0


def test_blocks_held_never_exceed_the_bound_that_the_check_knows():
    scheduler = small(num_blocks=30)
    device = Device(scheduler)
    request = make_request("r", 7, 30)
    scheduler.add(request)
    while scheduler.has_requests:
        device.step()
        assert len(request.block_ids) <= -(-(request.num_tokens + 1) // 4)


def test_no_token_is_planned_past_the_end():
    scheduler = small()
    device = Device(scheduler)
    request = make_request("r", 3, 4)
    scheduler.add(request)
    planned = 0
    for _ in range(10):
        planned += device.step().num_tokens
    assert planned == 3 + 3, "the fourth token is sampled by the step that computes the third"


def test_recompute_all_keeps_order_and_results():
    scheduler = small(num_blocks=40)
    device = Device(scheduler, overlap=False)
    requests = [make_request(str(i), 3 + i, 6) for i in range(3)]
    for request in requests:
        scheduler.add(request)
    device.step()
    device.step()
    scheduler.recompute_all()
    device.cached.clear()
    scheduler.check_integrity()
    assert list(scheduler.waiting) == requests
    while scheduler.has_requests:
        device.step()
    assert all(len(request.output_token_ids) == 6 for request in requests)
