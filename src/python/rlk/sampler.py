"""Token by token from a paged cache: chunked prefill, prefix reuse, sequences that join and leave.

    sampler = rlk.sampler.Sampler(model, pages=256)
    answers = sampler.run([Request(prompt, most=64, seed=1, stream=i) for i in range(8)])
    answers[0].tokens, answers[0].logp               # what the trainer's model.score says of them, to the bit

How a prompt is cut, which pages it lies in, who else is in the batch and when they leave changes no bit: an op's row knows its own
sequence alone. The noise of a token is that of (seed, stream, position), so a request draws the same answer in any company. In a trace the
rows of a request are those of the sequence `stream`.
"""

import operator
from collections import OrderedDict, deque
from dataclasses import dataclass, field

import torch

import rlk
from rlk import _errors
from rlk._hybrid import Resident, Stepped, copied
from rlk.model import branch, fp8


@dataclass(frozen=True)
class Request:
    prompt: list
    most: int = 16  # tokens to draw
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stream: int = 0
    stop: int = -1  # a token that ends the answer


@dataclass
class Answer:
    tokens: list = field(default_factory=list)
    logp: list = field(default_factory=list)  # among the tokens that the filters left


@dataclass(eq=False)
class _Running:
    request: Request
    answer: Answer
    tokens: list  # prompt and answer
    table: list  # its pages, in order
    cached: int = 0  # tokens whose keys and values are in the pages
    kept: dict = field(default_factory=dict)  # what recurrent layers keep of it
    chain: tuple = (0, 0)  # how many pages the cache knows as a prefix, and the last one's number there


class Cache:
    """Pages of keys and values for every layer, and which of them are whole prefixes that others may read."""

    def __init__(self, model, pages, page_size, most_states):
        c = model.config
        keys, values = (c.plain_dim + c.extra_dim, c.value_dim) if c.period else (c.head_dim, c.head_dim)
        shape = (c.layers // (c.period or 1), pages + 1, page_size, c.kv_heads)
        self.layers = {layer: i for i, layer in enumerate(range((c.period or 1) - 1, c.layers, c.period or 1))}
        # NaN shows whatever reads a place that was not written. The page behind the last is for rows that are nobody's.
        dtype = torch.float8_e4m3fn if c.fp8_cache else model.embed.dtype
        self.k, self.v = (torch.full((*shape, d, dtype.itemsize), 0xff, dtype=torch.uint8, device=model.device).view(dtype).squeeze(-1)
                          for d in (keys, values))
        self.page_size, self.count = page_size, pages
        self._free, self._users = deque(range(pages)), [0] * pages
        # A prefix is known by its last page's tokens and the number of what comes before: (number, tokens) -> (page, number).
        self._known, self._prefix, self._numbers = {}, {}, 0
        # What recurrent layers keep at the end of such a page, of at most so many; pages whose end no step met have none.
        self.recurrent, self.most_states, self._states = c.period > 0, most_states, OrderedDict()

    @property
    def free(self):
        return len(self._free) + sum(self._users[p] == 0 for p in self._prefix)

    def take(self):
        if not self._free:  # the oldest prefix that nobody reads goes
            page = next((p for p in self._prefix if self._users[p] == 0), None)
            if page is None:
                raise _errors.OutOfMemory(f"sampler: all {self.count} pages of the cache are in use")
            del self._known[self._prefix.pop(page)]
            self._states.pop(page, None)
            self._free.append(page)
        page = self._free.popleft()
        self._users[page] = 1
        return page

    def give_back(self, table):
        for page in table:
            self._users[page] -= 1
            if self._users[page] == 0 and page not in self._prefix:
                self._free.append(page)

    def forget(self):
        """Nothing in the pages may be read by later requests: the weights are others."""
        self._free.extend(p for p in self._prefix if self._users[p] == 0)
        self._known, self._prefix = {}, {}
        self._states.clear()

    def keep(self, s):
        """Remembers the pages of a sequence that are full, for requests that begin alike."""
        done, before = s.chain
        while (done + 1) * self.page_size <= s.cached:
            key, page = (before, tuple(s.tokens[done * self.page_size:(done + 1) * self.page_size])), s.table[done]
            if key not in self._known:
                self._numbers += 1
                self._known[key], self._prefix[page] = (page, self._numbers), key
            done, before = done + 1, self._known[key][1]
            if self.recurrent and done * self.page_size == s.cached:
                self._states[self._known[key][0]] = copied(s.kept)
                if len(self._states) > self.most_states:
                    self._states.popitem(last=False)
        s.chain = done, before

    def find(self, s, most):
        """Gives a sequence the pages that hold its beginning, of at most so many tokens."""
        found, before = [], 0
        while (len(found) + 1) * self.page_size <= most:
            at = len(found) * self.page_size
            key = before, tuple(s.tokens[at:at + self.page_size])
            if key not in self._known:
                break
            found.append(self._known[key])
            before = found[-1][1]
        while self.recurrent and found and found[-1][0] not in self._states:
            found.pop()
        for page, before in found:
            self._users[page] += 1
            s.table.append(page)
        s.chain, s.cached = (len(found), before if found else 0), len(found) * self.page_size
        if self.recurrent and found:
            s.kept = copied(self._states[page])
            self._states.move_to_end(page)

    def end(self, s):
        """Where a prompt is cut so that its last whole page becomes a prefix that recurrent layers can go on from."""
        return (len(s.tokens) - 1) // self.page_size * self.page_size


def write(pages, slots, rows):
    if pages.dtype == torch.float8_e4m3fn:  # torch moves its bytes
        pages, rows = pages.view(torch.uint8), fp8(rows).view(torch.uint8)
    pages.flatten(0, 1)[slots] = rows


class Sampler:
    """Serves requests from one model. `chunk` rows of a prompt go into one step, `batch` sequences run side by side. With `graphs`,
    by default on a GPU, steps that draw a token for every sequence are captured once for every size and replayed: to the same
    bits."""

    def __init__(self, model, *, pages=1024, page_size=16, chunk=512, batch=64, reuse=True, graphs=None):
        for name, value in (("pages", pages), ("page_size", page_size), ("chunk", chunk), ("batch", batch)):
            if value < 1:
                raise _errors.InvalidArgument(f"sampler: {name} is {value}, it must be at least 1")
        self.model, self.chunk, self.batch, self.reuse = model, chunk, batch, reuse
        self.graphs = model.device.type == "cuda" and model.ops is rlk.torch if graphs is None else graphs
        self.cache = Cache(model, pages, page_size, most_states=max(batch, 64))
        self.waiting, self.running = deque(), []
        self.note = None  # is shown every op's rows with their (request, position)
        self._steady, self._last = {}, None  # captured steps, by their sizes, and the last one
        self._resident = {}  # what recurrent layers keep, by the number of sequences that such a step takes

    def weights_changed(self):
        """What was computed with other weights serves no later request; none may be running."""
        if self.running:
            raise _errors.InvalidArgument(f"sampler: weights changed while {len(self.running)} sequences run")
        self.cache.forget()

    def add(self, request):
        """Queues a request. Its answer fills while step() is called."""
        c, cache = self.model.config, self.cache
        if not request.prompt:
            raise _errors.InvalidArgument("sampler: a prompt has no tokens, at least one is needed")
        bad = next((t for t in request.prompt if not 0 <= t < c.vocab), None)
        if bad is not None:
            raise _errors.InvalidArgument(f"sampler: a prompt has token {bad}, the vocabulary has {c.vocab}")
        most = len(request.prompt) + request.most
        if most > c.max_length:
            raise _errors.InvalidArgument(f"sampler: {most} tokens are asked for, the model's max_length is {c.max_length}")
        if -(-most // cache.page_size) > cache.count:
            raise _errors.InvalidArgument(
                f"sampler: {most} tokens need {-(-most // cache.page_size)} pages, the cache has {cache.count}")
        answer = Answer()
        self.waiting.append(_Running(request, answer, list(request.prompt), []))
        return answer

    def run(self, requests):
        """Serves requests to their end."""
        answers = [self.add(r) for r in requests]
        while self.step():
            pass
        return answers

    def step(self):
        """One pass over the model for all that run: a chunk of a prompt, or one more token. False when nothing is left to do."""
        ahead = self._last is not None and self._last.ahead
        if not ahead:
            self._admit()
        if not self.running:
            return False
        work = [(s, 1 if ahead else self._rows_of(s)) for s in self.running]
        for s, n in work:
            while len(s.table) * self.cache.page_size < s.cached + n:
                s.table.append(self.cache.take())
        drawn = [s for s, n in work if s.cached + n == len(s.tokens)]
        if ahead or self.graphs and not rlk.tracing() and all(len(s.tokens) - s.cached == 1 for s in self.running):
            found = self._steady_step(drawn)
        else:
            hidden = self._forward(work)
            ends = torch.tensor([n for _, n in work]).cumsum(0) - 1
            rows = ends[[i for i, (s, n) in enumerate(work) if s.cached + n == len(s.tokens)]].to(hidden.device)
            found = self._draw(drawn, hidden[rows]) if drawn else None
        for s, n in work:
            s.cached += n
            if self.reuse:
                self.cache.keep(s)
        if drawn:
            self._append(drawn, *found)
        return True

    def _rows_of(self, s):
        """How many rows of a sequence go into this step."""
        n = min(len(s.tokens) - s.cached, self.chunk)
        end = self.cache.end(s)
        return end - s.cached if self.reuse and self.cache.recurrent and s.cached < end < s.cached + n else n

    def _admit(self):
        cache = self.cache
        promised = sum(self._needed(s) - len(s.table) for s in self.running)
        while self.waiting and len(self.running) < self.batch:
            s = self.waiting[0]
            if self._needed(s) > cache.free - promised:
                break  # in the order of asking: nobody overtakes
            if self.reuse:  # the last token of a prompt is computed: its row draws
                cache.find(s, len(s.tokens) - 1)
            promised += self._needed(s) - len(s.table)
            self.running.append(self.waiting.popleft())

    def _needed(self, s):
        return -(-(len(s.request.prompt) + s.request.most) // self.cache.page_size)

    def _forward(self, work):
        size, device = self.cache.page_size, self.model.device
        rows, keys, slots, lengths = [], [], [], []
        for s, n in work:
            span = range(s.cached, s.cached + n)
            rows += [s.tokens[p] for p in span]
            keys += [(s.request, p) for p in span]
            slots += [s.table[p // size] * size + p % size for p in span]
            lengths.append(s.cached + n)

        def ints(values, dtype=torch.int32):
            return torch.tensor(values, dtype=dtype).to(device)

        widest = max(len(s.table) for s, _ in work)
        table = ints([s.table + [0] * (widest - len(s.table)) for s, _ in work])
        cu_q = ints([0, *torch.tensor([n for _, n in work]).cumsum(0).tolist()])
        if rlk.tracing():
            rlk.trace_rows([request.stream for request, _ in keys], [p for _, p in keys])
        more = {} if self.note is None else {"note": lambda layer, name, found: self.note(layer, name, found, keys)}
        if self.model.config.period:
            more["recur"] = Stepped(self.model.ops, [s.kept for s, _ in work], [n for _, n in work])
        return self._rows(ints(rows), ints([p for _, p in keys]), ints(slots, torch.int64), cu_q, ints(lengths), table, **more)

    def _rows(self, tokens, positions, slots, cu_q, lengths, table, **options):
        """Hidden rows of these tokens, their keys and values written to their slots."""
        cache, ops = self.cache, self.model.ops

        def keep(layer, v):
            at = cache.layers[layer]
            return {"v": v, "slots": slots, "k_cache": cache.k[at].flatten(0, 1), "v_cache": cache.v[at].flatten(0, 1)}

        def attend(layer, q, k, v):
            pages_k, pages_v = cache.k[cache.layers[layer]], cache.v[cache.layers[layer]]
            if k is not None:  # else they are there
                with branch(v) as values:
                    write(pages_v, slots, v)
                write(pages_k, slots, k)
                values.join()
            return ops.attention(q, pages_k, pages_v, cu_q, kv_len=lengths, block_table=table)

        with torch.no_grad():
            return self.model(tokens, positions, attend, keep=keep, **options)

    def _columns(self, sequences, rows):
        """What sample wants to know of each row, in lists of `rows`: the last are nobody's."""
        spare = [Request([0])] * (rows - len(sequences))
        requests = [s.request for s in sequences] + spare
        places = [len(s.tokens) for s in sequences] + [0] * len(spare)
        whole = {name: [getattr(r, name) for r in requests] for name in ("seed", "stream", "top_k")} | {"position": places}
        real = {name: [getattr(r, name) for r in requests] for name in ("temperature", "top_p")}
        if not any(whole["top_k"]):
            del whole["top_k"]
        if all(p >= 1 for p in real["top_p"]):
            del real["top_p"]
        return whole, real

    def _draw(self, sequences, hidden):
        """The next token of every sequence and its log-probability, from the row of its last token."""
        whole, real = self._columns(sequences, len(sequences))
        given = {k: torch.tensor(v).to(hidden.device) for k, v in whole.items()}
        given |= {k: torch.tensor(v, dtype=torch.float32).to(hidden.device) for k, v in real.items()}
        trace_drawn(sequences, "logits")
        logits = self._logits(hidden)
        trace_drawn(sequences, "score")
        found = self._sample(logits, given)
        trace_drawn((), None)
        return found

    def _logits(self, hidden):
        with torch.no_grad():
            return self.model.logits(hidden)

    def _sample(self, logits, given):
        with torch.no_grad():
            return self.model.ops.sample(logits, given["temperature"], logp=True,
                                         **{k: v for k, v in given.items() if k != "temperature"})

    def resident(self, rows):
        if rows not in self._resident:
            self._resident[rows] = Resident(self.model, rows)
        return self._resident[rows]

    def _append(self, sequences, token, logp):
        for s, t, value in zip(sequences, token.tolist(), logp.tolist()):
            if t < 0:
                raise _errors.Error(f"sampler: no token can be drawn at position {len(s.tokens)}: the logits are not finite")
            s.tokens.append(t)
            s.answer.tokens.append(t)
            s.answer.logp.append(value)
            if t == s.request.stop or len(s.answer.tokens) == s.request.most:
                self.running.remove(s)
                self.cache.give_back(s.table)

    def _steady_step(self, sequences):
        """One more token for every sequence, by the captured step of the next size."""
        step = self._last
        if step is None or not (step.ahead or step.goes_on(sequences)):
            step = self._last = self._captured(sequences)
        token, logp = step.run(sequences)
        if self.note is not None:
            keys = [(s.request, s.cached) for s in sequences]
            for layer, name, found in step.noted:
                self.note(layer, name, found[:len(sequences)], keys)
        return token, logp

    def _captured(self, sequences):
        widest = max(len(s.table) for s in sequences)
        rows, width = 1 << (len(sequences) - 1).bit_length(), 1 << (widest - 1).bit_length()
        whole, real = self._columns(sequences, rows)
        key = rows, width, *whole, *real
        if key not in self._steady:
            self._steady[key] = _Steady(self, rows, width, list(whole), list(real))
        self._steady[key].fill(sequences, whole, real)
        return self._steady[key]


class _Steady:
    """A step of one token for each of `rows` sequences whose pages fit a table of `width`: the same kernels on the same memory, so
    that a GPU replays it as one graph. It leaves that memory as the next token needs it, so the host writes there only where other
    sequences come or one has a new page; and where none can end, the next token is begun before the host looks at this one. Rows
    beyond the sequences compute with the cache's spare page, and nobody reads them."""

    def __init__(self, sampler, rows, width, whole, real):
        self.sampler, self.rows, self.width, device = sampler, rows, width, sampler.model.device
        self.recur = sampler.resident(rows) if sampler.cache.recurrent else None
        whole = [name for name in whole if name != "position"]
        # Those of `counted` are one more after every step.
        self.token, self.counted = ["token"], [["place", "length"], ["slot", "position", *(["open"] if self.recur else [])]]
        self.names = [[*self.token, *self.counted[0]], [*self.counted[1], *whole], real]
        self.small, self.whole = (torch.zeros(len(names), rows, dtype=dtype, device=device)
                                  for names, dtype in zip(self.names, (torch.int32, torch.int64)))
        self.real = torch.ones(len(real), rows, device=device)
        self.live = [torch.zeros(rows, dtype=dtype, device=device) for dtype in (torch.int32, torch.int64)]
        self.table = torch.zeros(rows, width, dtype=torch.int32, device=device)
        self.bounds = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self.graph, self.noted, self.found, self.next = None, [], None, []
        # Whether the next step is begun; how many more have room, with those of now; and what ends a sequence.
        self.ahead, self.left, self.stops = False, 0, []
        self.host = [torch.empty(rows, dtype=dtype, pin_memory=True) for dtype in (torch.int64, torch.float32)] if device.type == "cuda" else None

    def fill(self, sequences, whole, real):
        cache, spare = self.sampler.cache, self.rows - len(sequences)
        size = cache.page_size
        own = {"token": [s.tokens[-1] for s in sequences] + [0] * spare, "place": [s.cached for s in sequences] + [0] * spare,
               "slot": [s.table[s.cached // size] * size + s.cached % size for s in sequences] + [cache.count * size] * spare,
               "length": [s.cached + 1 for s in sequences] + [1] * spare} | whole | real
        if self.recur:
            own["open"] = self.recur.take(sequences) + [0] * spare
        for t, names in zip((self.small, self.whole, self.real), self.names):
            t.copy_(torch.tensor([own[name] for name in names], dtype=t.dtype))
        for t in self.live:
            t.copy_(torch.tensor([1] * len(sequences) + [0] * spare, dtype=t.dtype))
        self.left = min(min(len(s.table) * size - s.cached, s.request.most - len(s.answer.tokens)) for s in sequences)
        self.stops = [s.request.stop for s in sequences]
        tables = [s.table + [cache.count] * (self.width - len(s.table)) for s in sequences]
        self.table.copy_(torch.tensor(tables + [[cache.count] * self.width] * spare, dtype=torch.int32))

    def goes_on(self, sequences):
        """Whether the memory is as the step before left it for these sequences."""
        return len(sequences) == len(self.next) and all(
            s is t and s.cached == cached and len(s.table) == pages for s, (t, cached, pages) in zip(sequences, self.next))

    def compute(self):
        given = {name: t for names, rows in zip(self.names, (self.small, self.whole, self.real)) for name, t in zip(names, rows)}
        token, place, length, slot = (given.pop(name) for name in ("token", "place", "length", "slot"))
        noted = []
        more = {} if self.sampler.note is None else {"note": lambda *what: noted.append(what)}
        if self.recur:
            self.recur.open, more["recur"] = given.pop("open"), self.recur
        hidden = self.sampler._rows(token, place, slot, self.bounds, length, self.table, **more)
        self.noted = noted
        drawn, logp = self.sampler._sample(self.sampler._logits(hidden), given)
        token.copy_(drawn)
        for t, live, first, names in zip((self.small, self.whole), self.live, (1, 0), self.counted):
            t[first:first + len(names)] += live
        if self.host is None:
            return drawn, logp
        for to, t in zip(self.host, (drawn, logp)):
            to.copy_(t, non_blocking=True)
        return self.host

    def run(self, sequences):
        if not self.ahead:
            self._begin()
        self.ahead, self.next = False, []
        if self.host is not None:
            torch.cuda.current_stream().synchronize()
        found = [t[:len(sequences)].clone() for t in self.found]
        if self.recur is not None:
            self.recur.step(sequences)
        if self.recur is None or not self.recur.began(sequences):
            self.next = [(s, s.cached + 1, len(s.table)) for s in sequences]
        self.left -= 1
        if self._may_go_ahead(found[0].tolist()):
            self._begin()
            self.ahead = True
        return found

    def _may_go_ahead(self, tokens):
        """Not where the next step is another one, or somebody looks at what this one left: notes, a trace, prefixes of recurrent layers."""
        return (self.left > 0 and self.recur is None and self.sampler.note is None and not rlk.tracing() and min(tokens) >= 0
                and not any(map(operator.eq, tokens, self.stops)))

    def _begin(self):
        if self.host is None:
            self.found = self.compute()
            return
        if self.graph is None:
            self._capture()
        self.graph.replay()
        self.found = self.host

    def _capture(self):
        """What is done once must not be captured, so the step is first computed, and then all that it changed is as before."""
        changed = [self.small, self.whole, *(self.recur.tensors() if self.recur else [])]
        kept, side = [t.clone() for t in changed], torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.compute()
        torch.cuda.current_stream().wait_stream(side)
        for t, before in zip(changed, kept):
            t.copy_(before)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.compute()


def trace_drawn(sequences, tag):
    """In a trace, whose next tokens the following calls are about: of each sequence, the row of its last token."""
    if rlk.tracing():
        rlk.trace_rows([s.request.stream for s in sequences], [len(s.tokens) - 1 for s in sequences])
        rlk.trace_tag(tag)
