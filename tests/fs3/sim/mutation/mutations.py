"""Rules of the protocol, each taken away by a small replacement in one source file."""

from dataclasses import dataclass

MANAGER = "src/fireflyer/fs3/manager/"
CHAINS = MANAGER + "chains.py"
REPLICA = "native/fs3/replica/"
STORE = "native/fs3/store/"
SIM = "tests/fs3/sim/"


@dataclass(frozen=True)
class Mutant:
    """`old` occurs once in `file`; without the rule it is `new`. `suited`: the families of histories that
    are tried first."""

    name: str
    file: str
    old: str
    new: str
    suited: tuple[str, ...] = ()


MUTANTS = (
    # Membership
    Mutant(
        "a restarted process stays serving",
        CHAINS,
        "and local.incarnation == member.incarnation\n",
        "\n",
    ),
    Mutant(
        "a faulty target stays in the chain",
        CHAINS,
        "and local.state is not LocalState.FAULTY\n    )\n",
        ")\n",
        ("disks",),
    ),
    Mutant(
        "a finished sync counts at any version",
        CHAINS,
        "LocalState.UPTODATE or local.version != version:",
        "LocalState.UPTODATE:",
        ("syncs",),
    ),
    Mutant(
        "the first of the last ones serves at once",
        CHAINS,
        "Public.SERVING if len(last) == 1 else Public.RECOVERING",
        "Public.SERVING",
        ("lies",),
    ),
    Mutant(
        "recovery waits for nobody",
        MANAGER + "core.py",
        "waited >= self.times.recovery_wait_s",
        "waited >= 0.0",
        ("lies",),
    ),
    Mutant(
        "an emptied store holds what it served",
        CHAINS,
        "return local is None or member.store in (0, local.store)",
        "return True",
        ("wipes",),
    ),
    Mutant(
        "two sync at once",
        CHAINS,
        "    if any(member.state is Public.SYNCING for member in members):\n        return members\n",
        "",
    ),
    Mutant(
        "no word of the others is awaited",
        CHAINS,
        "return staying if len(staying) < len(serving) else ()",
        "return ()",
    ),
    Mutant(
        "a lease counts from when it was answered",
        SIM + "node.py",
        "                self.learn(answer)\n",
        "                self.learn(answer)\n                number = self.lease.send(self.clock())\n",
        ("leases",),
    ),
    Mutant(
        "the manager does not wait for the lease's end",
        MANAGER + "leases.py",
        "return self.lease_s * 1.1 + 0.05",
        "return self.lease_s * 0.6",
        ("leases",),
    ),
    Mutant(
        "a node gets a lease while its dismissal is being saved",
        MANAGER + "core.py",
        "        if self._is_leaving(node):\n",
        "        if False:\n",
        ("leases", "takeovers"),
    ),
    Mutant(
        "a new manager calls nodes dead at once",
        MANAGER + "core.py",
        "if now - self._started <= self.times.dead_s and self._awaits_heartbeat(chain):",
        "if False:",
        ("leases",),
    ),
    Mutant(
        "a primary acts on when its own lease is over",
        MANAGER + "election.py",
        "return now < self._ends",
        "return self._ends > 0.0",
        ("takeovers",),
    ),
    Mutant(
        "changes of an older primary are saved",
        MANAGER + "service.py",
        "if row is None or row.epoch != epoch:",
        "if row is None:",
        ("takeovers",),
    ),
    # Leases, in the shells
    Mutant(
        "an apply is reported before it is synced",
        SIM + "deeds.py",
        "        process.given += 1\n        process.sync_soon()\n",
        "        process.given += 1\n        process.sync_soon()\n"
        "        size = max(action.length, action.offset + len(data))\n"
        "        process.later(0.0, process.applied, action.op, status, size)\n",
    ),
    Mutant(
        "a syncing target gets tags of pending writes",
        SIM + "deeds.py",
        "return (client, channel, seq, inode, index, 0, 0) if version and pending == version else tagged",
        "return tagged",
        ("successions",),
    ),
    Mutant(
        "a syncing target keeps its own tags",
        SIM + "deeds.py",
        "        process.store.forget_client(client)\n",
        "        pass\n",
        (
            "successions",
            "syncs",
        ),
    ),
    Mutant(
        "damage of the log is forgotten",
        REPLICA + "store_lookup.hpp",
        "return store_.state()[0] == 0 && !store_.damaged();",
        "return store_.state()[0] == 0;",
        ("lies",),
    ),
    # The replica
    Mutant(
        "a retried write is made again",
        REPLICA + "writes.cpp",
        "  if (stored != write.tag.seq || known.tag.client == 0 || known.version == 0) return false;\n",
        "  if (known.tag.client == 0 || known.version != ~Version{0}) return false;\n",
    ),
    Mutant(
        "an old write of a channel is made",
        REPLICA + "writes.cpp",
        "  if (write.tag.seq < newest) {\n",
        "  if (write.tag.seq + 1000 < newest) {\n",
        ("duplicates",),
    ),
    Mutant(
        "a client's chain version is not compared",
        REPLICA + "writes.cpp",
        "if (!head() || write.chain_version != chain_) {",
        "if (!serving()) {",
    ),
    Mutant(
        "an update's chain version is not compared",
        REPLICA + "writes.cpp",
        "if (!follows || update.chain_version != chain_ || update.from != predecessor_) {",
        "if (!follows) {",
    ),
    Mutant(
        "a syncing target takes an update again",
        REPLICA + "writes.cpp",
        "answered != answered_.end()) {",
        "answered != answered_.end() && answered->second != Status::ok) {",
        ("syncs",),
    ),
    Mutant(
        "the number of a removal of nothing is used again",
        REPLICA + "recovery.cpp",
        "theirs->pending > (here != 0 ? here : floor_);",
        "here != 0 && theirs->pending > here;",
        ("lies",),
    ),
    Mutant(
        "damaged bytes replace what others have",
        REPLICA + "repair.cpp",
        "!client->left : only_here_.contains(place.first);",
        "!client->left : false;",
        ("lies",),
    ),
    Mutant(
        "late duplicates are taken",
        REPLICA + "writes.cpp",
        "  if (update.op < settled_seen_) {\n",
        "  if (false) {\n",
        ("duplicates",),
    ),
    Mutant(
        "a version is made twice",
        REPLICA + "writes.cpp",
        "return update.version <= chunk.committed || gone;",
        "return false && gone;",
        (
            "successions",
            "mixed",
        ),
    ),
    Mutant(
        "the head answers before its successor",
        REPLICA + "jobs.cpp",
        "return serving() && successor_ != 0;",
        "return serving() && successor_ != 0 && !head_;",
    ),
    Mutant(
        "each commits before its successor",
        REPLICA + "writes.cpp",
        "  write.committed = any_base || successor_ == 0;\n",
        "  write.committed = true;\n",
    ),
    Mutant(
        "numbers of removed versions are used again",
        REPLICA + "writes.cpp",
        "write.version = std::max({given_up_, floor_, removals_.empty() ? 0 : *removals_.rbegin()}) + 1;",
        "write.version = 2;",
        ("successions",),
    ),
    Mutant(
        "a removal waits for no creation",
        REPLICA + "writes.cpp",
        "return write.kind != Kind::remove || creations_.empty() || *creations_.begin() > write.version;",
        "return true;",
        ("blackouts",),
    ),
    Mutant(
        "writes go to a syncing target as they are",
        REPLICA + "writes.cpp",
        "const bool whole = version.kind != Kind::remove && (version.whole || successor_syncs_);",
        "const bool whole = version.kind != Kind::remove && version.whole;",
    ),
    Mutant(
        "a read does not wait for what is pending",
        REPLICA + "reads.cpp",
        "  if (chunk.pending == 0) {\n    serve_parked(place);\n",
        "  if (chunk.pending != 0 && !chunk.removes) {\n    chunk.reads.pop_back();\n"
        "    act(ServeRead{read.op, read.chunk, chunk.pending});\n"
        "  } else if (true) {\n    serve_parked(place);\n",
    ),
    Mutant(
        "a read needs no lease",
        REPLICA + "reads.cpp",
        "if (!serving() || !leased() || chain_version != chain_) return ReadOutcome::refuse;",
        "if (!serving() || chain_version != chain_) return ReadOutcome::refuse;",
        ("leases",),
    ),
    Mutant(
        "what is pending stays so when routing changes",
        REPLICA + "replica.cpp",
        "  if (!chunk.busy && serving() && chunk.pending != 0) make_inherited(place);\n",
        "",
    ),
    Mutant(
        "a sync ends before its last answers",
        REPLICA + "sync.cpp",
        "    if (walk_.running > 0 || walk_.asking || !walk_.todo.empty()) return;\n"
        "    if (!walk_.exhausted) {\n      ask(Ask::page, successor_);",
        "    if (walk_.asking || !walk_.todo.empty()) return;\n"
        "    if (!walk_.exhausted) {\n      ask(Ask::page, successor_);",
        ("successions",),
    ),
    Mutant(
        "a sync does not compare CRCs or versions",
        REPLICA + "sync.cpp",
        "return mine->committed != theirs->committed || mine->crc != theirs->crc || theirs->pending != 0;",
        "return false;",
    ),
    Mutant(
        "a sync leaves what only the other has",
        REPLICA + "sync.cpp",
        "  if (mine == nullptr || theirs == nullptr) return true;\n",
        "  if (mine == nullptr) return false;\n  if (theirs == nullptr) return true;\n",
        ("successions",),
    ),
    Mutant(
        "a recovery takes nothing newer",
        REPLICA + "recovery.cpp",
        "    return newest(*theirs) > (here != 0 ? here : floor_);\n",
        "    return false;\n",
        ("lies",),
    ),
    Mutant(
        "a synced target forgets the floor",
        REPLICA + "follow.cpp",
        "    floor_ = std::max(floor_, done.floor);",
        "    ",
        ("successions",),
    ),
    # The store
    Mutant(
        "bytes are not synced before their record",
        STORE + "commit.cpp",
        "    sync_data(batch);\n",
        "",
    ),
    Mutant(
        "the log is not synced",
        STORE + "commit.cpp",
        "    disk_.sync(log_);\n  } catch (const Error&) {\n    failed_ = true;\n    return",
        "  } catch (const Error&) {\n    failed_ = true;\n    return",
    ),
    Mutant(
        "a dropped version keeps its tag",
        STORE + "commit.cpp",
        "tagged.version == r.version) tagged.version = tagged.length = 0;",
        "tagged.version == ~Version{0}) tagged.version = tagged.length = 0;",
        ("disks",),
    ),
    # Metadata
    Mutant(
        "a request that is sent again is done again",
        "src/fireflyer/fs3/kv/run.py",
        "self._record = record_key(*request) if request is not None else None",
        "self._record = None",
        ("meta",),
    ),
    Mutant(
        "a refusal is not recorded",
        "src/fireflyer/fs3/kv/run.py",
        "        if self._record is None or self._refusal is None:\n",
        "        if True:\n",
        ("meta",),
    ),
    Mutant(
        "forgotten answers are given anew",
        "src/fireflyer/fs3/meta/service.py",
        "if kept and number <= counter(t.get(record_key(client, 0))):",
        "if not kept and number < 0:",
        ("meta",),
    ),
    Mutant(
        "what is uncertain counts as done",
        "src/fireflyer/fs3/kv/run.py",
        "            if outcome is not Outcome.COMMITTED\n",
        "            if outcome is Outcome.CONFLICT\n",
        ("meta",),
    ),
    Mutant(
        "reads do not conflict",
        "src/fireflyer/fs3/kv/history.py",
        "            if last.get(key, 0) > version:\n",
        "            if last.get(key, 0) > version + 1000:\n",
        ("meta",),
    ),
    # The client
    Mutant(
        "a retry has another tag",
        SIM + "clients.py",
        "            target = serving[0]\n",
        "            target = serving[0]\n            client.seq += 1\n"
        "            self.tag = (client.number, client.channel, client.seq)\n",
    ),
    Mutant(
        "a client does not compare CRCs",
        SIM + "clients.py",
        "        elif good(answer.data, answer.crcs):",
        "        elif answer.crcs is not None:",
    ),
)
