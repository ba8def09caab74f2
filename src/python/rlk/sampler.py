"""Token by token from a paged cache: chunked prefill, prefix reuse, sequences that join and leave.

    sampler = rlk.sampler.Sampler(model, pages=256)
    answers = sampler.run([Request(prompt, most=64, seed=1, stream=i) for i in range(8)])
    answers[0].tokens, answers[0].logp               # what the trainer's model.score says of them, to the bit

How a prompt is cut, which pages it lies in, who else is in the batch and when they leave changes no bit: an op's row knows its own
sequence alone. The noise of a token is that of (seed, stream, position), so a request draws the same answer in any company.
"""

from collections import deque
from dataclasses import dataclass, field

import torch

from rlk import _errors


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


class Cache:
    """Pages of keys and values for every layer, and which of them are whole prefixes that others may read."""

    def __init__(self, model, pages, page_size):
        c = model.config
        shape = (c.layers, pages, page_size, c.kv_heads, c.head_dim)
        # NaN shows whatever reads a place that was not written.
        self.k, self.v = (torch.full(shape, float("nan"), dtype=model.embed.dtype, device=model.device) for _ in range(2))
        self.page_size, self.count = page_size, pages
        self._free, self._users = deque(range(pages)), [0] * pages
        self._known, self._prefix = {}, {}  # tokens up to a page's end -> page, and back

    @property
    def free(self):
        return len(self._free) + sum(self._users[p] == 0 for p in self._prefix)

    def take(self):
        if not self._free:  # the oldest prefix that nobody reads goes
            page = next((p for p in self._prefix if self._users[p] == 0), None)
            if page is None:
                raise _errors.OutOfMemory(f"sampler: all {self.count} pages of the cache are in use")
            del self._known[self._prefix.pop(page)]
            self._free.append(page)
        page = self._free.popleft()
        self._users[page] = 1
        return page

    def give_back(self, table):
        for page in table:
            self._users[page] -= 1
            if self._users[page] == 0 and page not in self._prefix:
                self._free.append(page)

    def keep(self, tokens, table):
        """Remembers the pages that are full, for requests that begin alike."""
        for i in range(len(tokens) // self.page_size):
            key = tuple(tokens[:(i + 1) * self.page_size])
            if key not in self._known and table[i] not in self._prefix:
                self._known[key], self._prefix[table[i]] = table[i], key

    def find(self, tokens, most):
        """Pages that hold the start of these tokens, of at most so many tokens."""
        table = []
        while (len(table) + 1) * self.page_size <= most:
            page = self._known.get(tuple(tokens[:(len(table) + 1) * self.page_size]))
            if page is None:
                break
            self._users[page] += 1
            table.append(page)
        return table


class Sampler:
    """Serves requests from one model. `chunk` rows of a prompt go into one step, `batch` sequences run side by side."""

    def __init__(self, model, *, pages=1024, page_size=16, chunk=512, batch=64, reuse=True):
        for name, value in (("pages", pages), ("page_size", page_size), ("chunk", chunk), ("batch", batch)):
            if value < 1:
                raise _errors.InvalidArgument(f"sampler: {name} is {value}, it must be at least 1")
        self.model, self.chunk, self.batch, self.reuse = model, chunk, batch, reuse
        self.cache = Cache(model, pages, page_size)
        self.waiting, self.running = deque(), []
        self.note = lambda layer, name, rows, keys: None  # is shown every op's rows with their (request, position)

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
        self._admit()
        if not self.running:
            return False
        work = [(s, min(len(s.tokens) - s.cached, self.chunk)) for s in self.running]
        hidden = self._forward(work)
        ends = torch.tensor([n for _, n in work]).cumsum(0) - 1
        drawn = [i for i, (s, n) in enumerate(work) if s.cached + n == len(s.tokens)]
        for s, n in work:
            s.cached += n
            if self.reuse:
                self.cache.keep(s.tokens[:s.cached], s.table)
        if drawn:
            self._draw([work[i][0] for i in drawn], hidden[ends[drawn].to(hidden.device)])
        return True

    def _admit(self):
        cache = self.cache
        promised = sum(self._needed(s) - len(s.table) for s in self.running)
        while self.waiting and len(self.running) < self.batch:
            s = self.waiting[0]
            if self._needed(s) > cache.free - promised:
                break  # in the order of asking: nobody overtakes
            if self.reuse:  # the last token of a prompt is computed: its row draws
                s.table = cache.find(s.tokens, len(s.tokens) - 1)
                s.cached = len(s.table) * cache.page_size
            promised += self._needed(s) - len(s.table)
            self.running.append(self.waiting.popleft())

    def _needed(self, s):
        return -(-(len(s.request.prompt) + s.request.most) // self.cache.page_size)

    def _forward(self, work):
        model, cache, device = self.model, self.cache, self.model.device
        size = cache.page_size
        rows, keys, slots, lengths = [], [], [], []
        for s, n in work:
            while len(s.table) * size < s.cached + n:
                s.table.append(cache.take())
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
        lengths, slots = ints(lengths), ints(slots, torch.int64)

        def attend(layer, q, k, v):
            pages_k, pages_v = cache.k[layer], cache.v[layer]
            pages_k.flatten(0, 1)[slots], pages_v.flatten(0, 1)[slots] = k, v
            return model.ops.attention(q, pages_k, pages_v, cu_q, kv_len=lengths, block_table=table)

        with torch.no_grad():
            return model(ints(rows), ints([p for _, p in keys]), attend,
                         note=lambda layer, name, found: self.note(layer, name, found, keys))

    def _draw(self, sequences, hidden):
        device = hidden.device

        def column(name, dtype):
            return torch.tensor([getattr(s.request, name) for s in sequences], dtype=dtype).to(device)

        filters = {}
        if any(s.request.top_k for s in sequences):
            filters["top_k"] = column("top_k", torch.int32)
        if any(s.request.top_p < 1 for s in sequences):
            filters["top_p"] = column("top_p", torch.float32)
        positions = torch.tensor([len(s.tokens) for s in sequences]).to(device)
        with torch.no_grad():
            token, logp = self.model.ops.sample(
                self.model.logits(hidden), column("temperature", torch.float32), seed=column("seed", torch.int64),
                stream=column("stream", torch.int32), position=positions, logp=True, **filters)
        for s, t, value in zip(sequences, token.tolist(), logp.tolist()):
            if t < 0:
                raise _errors.Error(f"sampler: no token can be drawn at position {len(s.tokens)}: the logits are not finite")
            s.tokens.append(t)
            s.answer.tokens.append(t)
            s.answer.logp.append(value)
            if t == s.request.stop or len(s.answer.tokens) == s.request.most:
                self.running.remove(s)
                self.cache.give_back(s.table)
