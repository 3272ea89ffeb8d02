"""Forty small faults that an engineer could make, each with the tests that should notice it.

A suite is worth what it finds. `tests/test_planted_faults.py` plants one of these at a time in a
copy of the code, and expects that its tests fail. Whoever takes tests away runs it before and
after; whoever changes a quoted place changes the quotation, too. Files of tests are searched for
in `tests/`, so that moving one costs nothing here.
"""

from dataclasses import dataclass

__all__ = ["FAULTS", "Fault"]

_SUMS, _PSI = "protocols/apfed_protocols/sums/", "protocols/apfed_protocols/psi/"
_SEAL, _MOMENTS = "protocols/apfed_protocols/seal.py", "protocols/apfed_protocols/moments.py"
_NOISE = "protocols/apfed_protocols/noise.py"
_PRIVACY, _EXCHANGE = "secure_apfed/privacy/", "secure_apfed/exchange/"
_METHODS, _LEARNING = "secure_apfed/methods/", "secure_apfed/learning/"


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        name: of it.
        file: that has it, from the project's root.
        right: what stands there, exactly once; wrong: what is put in its place.
        breaks: what is lost, in a sentence.
        tests: names of files of tests that notice it, those that do soonest first.
    """

    name: str
    file: str
    right: str
    wrong: str
    breaks: str
    tests: tuple[str, ...]


# Six were noticed by no test when all were first planted, and have tests since: key_after_refusal,
# tails_for_nothing, row_twice_counts_once, one_key_for_two_parties, charged_before_counted and
# answer_leaves_twice.

_PROTOCOLS = (
    Fault(
        "mask_of_any_shape",
        _SUMS + "masked.py",
        'keystream_chunks(seed, b"mask", binding_digest, shape, length',
        'keystream_chunks(seed, b"mask", binding_digest, length',
        "Two contributions of other shapes to one step lie under the same mask.",
        ("test_sums_masked.py",),
    ),
    Fault(
        "key_after_refusal",
        _SUMS + "masked.py",
        "self._peers, self._seeds, self._key = (), {}, None",
        "self._peers, self._seeds = (), {}",
        "After a refused sum the active keeps the key from which its seeds come again.",
        ("test_sums_reaction.py",),
    ),
    Fault(
        "range_without_noise",
        _SUMS + "fixed_point.py",
        "return self.levels + largest_noise(self.noise)",
        "return self.levels",
        "Rings and slots are sized without the noise's tail: large sums wrap around.",
        ("test_sums_noise.py",),
    ),
    Fault(
        "step_used_again",
        _SUMS + "frames.py",
        "if binding.step <= self._last_step:",
        "if binding.step < self._last_step:",
        "A step is answered twice under one mask: the difference of two answers is bare.",
        ("test_sums_contract.py",),
    ),
    Fault(
        "bytes_after_the_last_blob",
        _SUMS + "frames.py",
        "if start + sum(sizes) != len(data):",
        "if start + sum(sizes) > len(data):",
        "Frames have more than one spelling, and carry what nobody reads.",
        ("test_sums_frame.py",),
    ),
    Fault(
        "answer_for_too_few",
        _SUMS + "recoverable.py",
        "if strangers or self.me not in counted or len(counted) < self._frames.least:",
        "if strangers or self.me not in counted:",
        "A passive gives its share where an aggregator counts it alone.",
        ("test_sums_recovery.py",),
    ),
    Fault(
        "one_key_for_both_ways",
        _SEAL,
        "for name, hello in (sender, receiver)",
        "for name, hello in sorted((sender, receiver))",
        "Both directions of a link share key and nonces; a message reflects to its sender.",
        ("test_seal.py",),
    ),
    Fault(
        "twin_point_of_order_8",
        _PSI + "ecdh.py",
        "(0, 1, _MODULUS - 1, _ORDER_EIGHT, pow(_ORDER_EIGHT, -1, _MODULUS))",
        "(0, 1, _MODULUS - 1, _ORDER_EIGHT)",
        "A peer sends a point of low order, and what comes back is known without the scalar.",
        ("test_psi_ecdh.py",),
    ),
    Fault(
        "tags_in_the_hubs_order",
        _PSI + "ecdh.py",
        "tags = tags[random_permutation(len(tags))]",
        "tags = tags[np.arange(len(tags))]",
        "Where only the size is to open, the hub reads which of its IDs are common.",
        ("test_psi_contract.py",),
    ),
    Fault(
        "sensitivity_of_signed_votes",
        _MOMENTS,
        "factor = 2.0 if self.signed else math.sqrt(2)",
        "factor = math.sqrt(2)",
        "The moment of votes that may be negative is noised by 0.7 of what it needs.",
        ("test_moments_views.py",),
    ),
    Fault(
        "zero_twice",
        _NOISE,
        "once_n = ~(negative_n & (magnitude_n == 0))",
        "once_n = magnitude_n >= 0",
        "Discrete noise is zero twice as often as the law says.",
        ("test_noise.py",),
    ),
)

_ACCOUNTS = (
    Fault(
        "add_remove_for_replace",
        _PRIVACY + "accountants.py",
        "return float(2 * clip * math.sqrt(releases) / gdp_mu(epsilon, delta))",
        "return float(clip * math.sqrt(releases) / gdp_mu(epsilon, delta))",
        "Noise is calibrated to half the sensitivity of replacing a row.",
        ("test_privacy_accountants.py",),
    ),
    Fault(
        "margin_to_the_wrong_side",
        _PRIVACY + "accountants.py",
        "return float(np.exp(root) * (1 - _MU_MARGIN))",
        "return float(np.exp(root) * (1 + _MU_MARGIN))",
        "A calibrated run overruns its budget in the last digits, and stops a release early.",
        ("test_privacy_accountants.py", "test_privacy_ledger.py"),
    ),
    Fault(
        "rounding_moves_nobody",
        _PRIVACY + "contributions.py",
        "return math.sqrt(rows) * (2 * levels * _ROUNDING + math.sqrt(columns))",
        "return math.sqrt(rows) * 2 * levels * _ROUNDING",
        "Half a step of rounding in each number is left out of a contribution's sensitivity.",
        ("test_privacy_accountants.py",),
    ),
    Fault(
        "tails_for_nothing",
        _PRIVACY + "contributions.py",
        "left = delta - (1 + math.exp(min(epsilon, 700.0))) * cut",
        "left = delta - min(epsilon, 700.0) * cut",
        "The tails of discrete noise that are cut off cost next to nothing.",
        ("test_privacy_accountants.py",),
    ),
    Fault(
        "noise_over_the_radius",
        _PRIVACY + "guard.py",
        "return GaussianRelease(noise_multiplier=self.sigma / self.sensitivity())",
        "return GaussianRelease(noise_multiplier=self.sigma / self.clip)",
        "The guard states a quarter of the privacy loss that a release has.",
        ("test_privacy_guards.py", "test_audit_release.py"),
    ),
    Fault(
        "row_twice_counts_once",
        _PRIVACY + "ledger.py",
        "int((counts.of_row_N[different] + times).max(initial=0))",
        "int((counts.of_row_N[different] + 1).max(initial=0))",
        "A batch that holds a row twice passes a budget that it exceeds.",
        ("test_privacy_ledger.py",),
    ),
    Fault(
        "free_though_never_charged",
        _PRIVACY + "ledger.py",
        "free = again.numpy() & (self._counts.of_row_N[sent] > 0)",
        "free = again.numpy()",
        "Frozen rows whose log was lost are sent without being charged.",
        ("test_privacy_guards.py",),
    ),
    Fault(
        "checkpoint_refunds",
        _PRIVACY + "ledger.py",
        "self.of_row_N = np.maximum(self.of_row_N, counts.numpy())",
        "self.of_row_N = counts.numpy().copy()",
        "Going back to an older checkpoint takes releases off the account.",
        ("test_privacy_ledger.py",),
    ),
    Fault(
        "clip_that_rounds_beyond",
        _PRIVACY + "noise.py",
        "return onto_ball(wide_BD, bound * (1 - margin))",
        "return onto_ball(wide_BD, bound)",
        "Rounded to float32, clipped rows are longer than the bound that is accounted for.",
        ("test_privacy_guards.py",),
    ),
    Fault(
        "one_ledger_of_two",
        _PRIVACY + "dp_sgd.py",
        "other = self.updates if ledger is self._releases else self._releases",
        "other = self.updates",
        "Updates of private training are played beyond the budget of the whole.",
        ("test_privacy_dp_sgd.py",),
    ),
    Fault(
        "same_noise_for_other_rows",
        _PRIVACY + "noise.py",
        "context = self._context(step, place, hashlib",
        "context = self._context(step, hashlib",
        "Equal numbers of other people at one step get the same noise.",
        ("test_privacy_guards.py",),
    ),
)

_MESSAGES = (
    Fault(
        "more_tensors_than_expected",
        _EXCHANGE + "codec.py",
        "if tensors.keys() != expected.keys():",
        "if not expected.keys() <= tensors.keys():",
        "A payload carries tensors that nobody asked for or looks at.",
        ("test_exchange_codec.py",),
    ),
    Fault(
        "metadata_without_end",
        _EXCHANGE + "codec.py",
        "if len(payload) < start or length > _META_LIMIT:",
        "if len(payload) < start:",
        "A peer makes a party parse metadata of any size.",
        ("test_exchange_codec.py",),
    ),
    Fault(
        "header_of_another_spelling",
        _EXCHANGE + "envelope.py",
        "if envelope.header != header:",
        "if len(envelope.header) > len(header):",
        "One header has several spellings.",
        ("test_exchange_codec.py",),
    ),
    Fault(
        "frame_for_somebody_else",
        _EXCHANGE + "links.py",
        "            if ends != (self._session, sender, self.me):\n",
        "            if ends[:2] != (self._session, sender):\n",
        "A frame for another party is taken.",
        ("test_exchange_links.py",),
    ),
    Fault(
        "announcement_up_to_any_bound",
        _EXCHANGE + "links.py",
        "        if total > most:\n",
        "        if total > MOST_BYTES:\n",
        "A peer announces, and sends, more than the receiver takes here.",
        ("test_exchange_parts.py",),
    ),
    Fault(
        "part_of_any_size",
        _EXCHANGE + "links.py",
        "if length != min(self._size, total - offset):",
        "if length > min(self._size, total - offset):",
        "A peer cuts a message into as many parts as it likes, empty ones without end.",
        ("test_exchange_parts.py",),
    ),
    Fault(
        "one_key_for_two_parties",
        _EXCHANGE + "agreement.py",
        "        [greeting.run_key for greeting in greetings.values()],\n",
        "",
        "Two parties with one run key between them pass for two.",
        ("test_exchange_agreement.py",),
    ),
    Fault(
        "known_by_another_identity",
        _EXCHANGE + "agreement.py",
        "        if identity != known:\n",
        "        if len(identity) != len(known):\n",
        "Anybody speaks in a party's name with an identity of its own.",
        ("test_exchange_agreement.py",),
    ),
)

_TRAINING = (
    Fault(
        "charged_before_counted",
        _METHODS + "sum_end.py",
        "        self.count(admitted, digest)\n        noise_BD = None\n"
        "        if self.noise is not None:\n"
        "            noise_BD = self.noise.draw(\n"
        "                values_BD.shape, step=admitted.step, known_B=self.known(admitted.rows),\n"
        "                digest=digest,\n"
        "            )  # fmt: skip\n",
        "        noise_BD = None\n"
        "        if self.noise is not None:\n"
        "            noise_BD = self.noise.draw(\n"
        "                values_BD.shape, step=admitted.step, known_B=self.known(admitted.rows),\n"
        "                digest=digest,\n"
        "            )  # fmt: skip\n        self.count(admitted, digest)\n",
        "A question that is refused because it was answered too often costs privacy first.",
        ("test_parties_apfed.py",),
    ),
    Fault(
        "answer_leaves_twice",
        _METHODS + "sum_end.py",
        "        self._admitted = None\n        values_BD",
        "        values_BD",
        "What was admitted once is answered again with other numbers.",
        ("test_parties_apfed.py",),
    ),
    Fault(
        "one_answer_more",
        _METHODS + "sum_end.py",
        ".max(initial=0)) >= self._answers:",
        ".max(initial=0)) > self._answers:",
        "The active gets one answer more about each row than was agreed.",
        ("test_parties_apfed.py",),
    ),
    Fault(
        "step_through_the_gate_again",
        _METHODS + "sum_end.py",
        "        if step <= self.last:\n",
        "        if step < self.last:\n",
        "A passive learns from, and answers, one step twice.",
        ("test_parties_apfed.py",),
    ),
    Fault(
        "same_answer_in_every_session",
        _METHODS + "sum_end.py",
        "content = hashlib.blake2b(session)",
        "content = hashlib.blake2b()",
        "Noise under a sum serves two sessions: the difference of two sums is bare of it.",
        ("test_parties_apfed.py",),
    ),
    Fault(
        "bound_to_rows_alone",
        _METHODS + "sum_end.py",
        "return StepBinding.of(session, step, rows=rows, message=payload)",
        "return StepBinding.of(session, step, rows=rows, message=rows)",
        "An active that sends passives different representations gets their sum.",
        ("test_parties_apfed.py",),
    ),
    Fault(
        "row_twice_in_a_batch",
        _LEARNING + "release.py",
        "if len(torch.unique(rows_B)) != len(rows_B):",
        "if len(torch.unique(rows_B)) < minimum:",
        "A batch repeats one person, whose gradient then stands out of the sum.",
        ("test_parties_apfed.py",),
    ),
    Fault(
        "lambda_over_the_batch",
        _METHODS + "apfed.py",
        "return z_B.grad * (weight * len(z_B))",
        "return z_B.grad * weight",
        "Passives help by a B-th of what Eq. 9 says.",
        ("test_methods_apfed.py",),
    ),
    Fault(
        "one_known_person_answered",
        _METHODS + "apfed.py",
        "if known < self.contract.minimum_batch or is_narrow(own_BD, self.terms):",
        "if is_narrow(own_BD, self.terms):",
        "Among strangers a single person of a passive is answered about alone.",
        ("test_methods_apfed.py",),
    ),
    Fault(
        "refusal_not_noted",
        _METHODS + "sum_end.py",
        "        except Exception:\n            self._noted.add(",
        "        except GeneratorExit:\n            self._noted.add(",
        "Who alters sums may ask again in each resumed session.",
        ("test_runs_refused_sum.py", "test_methods_votes.py"),
    ),
)

FAULTS: tuple[Fault, ...] = (*_PROTOCOLS, *_ACCOUNTS, *_MESSAGES, *_TRAINING)
