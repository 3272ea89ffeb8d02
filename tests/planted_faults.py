"""Fifty-three small faults that an engineer could make, each with the tests that should notice it.

`tests/test_planted_faults.py` plants one at a time in a copy of the code. Whoever takes tests away
runs it before and after; whoever changes a quoted place changes the quotation, too.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """What stands in a file exactly once, what is put in its place, what that breaks, and the names
    of files of tests that notice it, those that do soonest first.
    """

    name: str
    file: str
    right: str
    wrong: str
    breaks: str
    tests: tuple[str, ...]


# By file: name and files of tests, what it breaks, what stands there and what is put in its place.
_DIFFERENCES = r"""
--- protocols/apfed_protocols/sums/masked.py
mask_of_any_shape: test_sums_masked.py
    Two contributions of other shapes to one step lie under the same mask.
-keystream_chunks(seed, b"mask", binding_digest, shape, length
+keystream_chunks(seed, b"mask", binding_digest, length
key_after_refusal: test_sums_hostile.py
    After a refused sum the active keeps the key from which its seeds come again.
-        self._seed_by_peer = {}
-        self._own_key = None
+        self._seed_by_peer = {}
--- protocols/apfed_protocols/sums/fixed_point.py
range_without_noise: test_sums_noise.py
    Rings and slots are sized without the noise's tail: large sums wrap around.
-return self.max_level + largest_noise(self.noise)
+return self.max_level
--- protocols/apfed_protocols/sums/frames.py
step_used_again: test_sums_contract.py
    A step is answered twice under one mask: the difference of two answers is bare.
-if binding.step <= self._last_step:
+if binding.step < self._last_step:
bytes_after_the_last_blob: test_sums_frame.py
    Frames have more than one spelling, and carry what nobody reads.
-if start + sum(sizes) != len(data):
+if start + sum(sizes) > len(data):
--- protocols/apfed_protocols/sums/recoverable.py
answer_for_too_few: test_sums_recovery.py
    A passive gives its share where an aggregator counts it alone.
-if strangers or self.me not in counted or len(counted) < self._frames.min_contributors:
+if strangers or self.me not in counted:
--- protocols/apfed_protocols/seal.py
one_key_for_both_ways: test_seal.py
    Both directions of a link share key and nonces; a message reflects to its sender.
-for name, hello in (sender, receiver)
+for name, hello in sorted((sender, receiver))
--- protocols/apfed_protocols/psi/ecdh.py
twin_point_of_order_8: test_psi_ecdh.py
    A peer sends a point of low order, and what comes back is known without the scalar.
-(0, 1, _MODULUS - 1, _ORDER_EIGHT, pow(_ORDER_EIGHT, -1, _MODULUS))
+(0, 1, _MODULUS - 1, _ORDER_EIGHT)
tags_in_the_hubs_order: test_psi_contract.py
    Where only the size is to open, the hub reads which of its IDs are common.
-tags = tags[random_permutation(len(tags))]
+tags = tags[np.arange(len(tags))]
--- protocols/apfed_protocols/psi/ot.py
vector_of_no_store: test_psi_ot.py
    A hub sends a vector that is no store, and reads bits that hide a member's tags.
-if not hmac.compare_digest(expected_hashes.tobytes(), self._q_hashes.tobytes()):
+if expected_hashes.shape != self._q_hashes.shape:
--- protocols/apfed_protocols/psi/transfers.py
transfers_of_no_bits: test_psi_circuit_ot.py
    A hub sends transfers of no bits, and reads the member's shares of the triples.
-if not hmac.compare_digest(expected_hashes.tobytes(), self._q_hashes.tobytes()):
+if expected_hashes.shape != self._q_hashes.shape:
one_hash_for_all_transfers: test_psi_circuit_ot.py
    Equal rows of two transfers have one number, which ties the member's shares together.
-            tweaked[:, 0] ^= np.arange(first_index, first_index + len(encrypted), dtype=np.uint64)
+            tweaked[:, 0] ^= np.uint64(first_index & 0)
--- protocols/apfed_protocols/noise.py
zero_twice: test_noise.py
    Discrete noise is zero twice as often as the law says.
-is_counted_n = ~(is_negative_n & (magnitude_n == 0))
+is_counted_n = magnitude_n >= 0
wide_zero_twice: test_noise.py
    So is discrete noise of a large deviation.
-    is_accepted_n &= ~(is_negative_n & (magnitude_n == 0))
+    is_accepted_n &= magnitude_n >= 0
undecided_words_go_down: test_noise.py
    A word that leaves its bin open gets the lower one: the law is off by some 2^-56.
-    for proposal in undecided_proposals:
+    for proposal in undecided_proposals[:0]:
flat_bins: test_noise.py
    Within a bin every magnitude is as likely: the law is a staircase.
-offset_n * (low_n + magnitude_n), 2 * deviation**2
+offset_n * low_n, 2 * deviation**2
--- secure_apfed/privacy/accountants.py
add_remove_for_replace: test_privacy_accountants.py
    Noise is calibrated to half the sensitivity of replacing a row.
-return float(2 * clip * math.sqrt(releases) / gdp_mu(epsilon, delta))
+return float(clip * math.sqrt(releases) / gdp_mu(epsilon, delta))
margin_to_the_wrong_side: test_privacy_accountants.py test_privacy_ledger.py
    A calibrated run overruns its budget in the last digits, and stops a release early.
-return float(np.exp(root) * (1 - _MU_MARGIN))
+return float(np.exp(root) * (1 + _MU_MARGIN))
--- secure_apfed/privacy/contributions.py
rounding_moves_nobody: test_privacy_accountants.py
    Half a step of rounding in each number is left out of a contribution's sensitivity.
-return math.sqrt(rows_per_person) * (2 * steps_in_clip * _ROUNDING_FACTOR + math.sqrt(columns))
+return math.sqrt(rows_per_person) * 2 * steps_in_clip * _ROUNDING_FACTOR
tails_for_nothing: test_privacy_accountants.py
    The tails of discrete noise that are cut off cost next to nothing.
-remaining_delta = delta - (1 + math.exp(min(epsilon, 700.0))) * cut_tails
+remaining_delta = delta - min(epsilon, 700.0) * cut_tails
--- secure_apfed/privacy/guard.py
noise_over_the_radius: test_privacy_guards.py test_audit_release.py
    The guard states a quarter of the privacy loss that a release has.
-return GaussianRelease(noise_multiplier=self.sigma / self.sensitivity())
+return GaussianRelease(noise_multiplier=self.sigma / self.clip)
--- secure_apfed/privacy/ledger.py
row_twice_counts_once: test_privacy_ledger.py
    A batch that holds a row twice passes a budget that it exceeds.
-return int((self.releases_N[rows] + occurrences).max(initial=0))
+return int((self.releases_N[rows] + 1).max(initial=0))
free_though_never_charged: test_privacy_guards.py
    Frozen rows whose log was lost are sent without being charged.
-is_free = repeats.cpu().numpy() & (self._release_counts.releases_N[positions] > 0)
+is_free = repeats.cpu().numpy()
checkpoint_refunds: test_privacy_ledger.py
    Going back to an older checkpoint takes releases off the account.
-self.releases_N = np.maximum(self.releases_N, counts.numpy())
+self.releases_N = counts.numpy().copy()
--- secure_apfed/privacy/noise.py
clip_that_rounds_beyond: test_privacy_guards.py
    Rounded to float32, clipped rows are longer than the bound that is accounted for.
-return onto_ball(wide_BD, bound * (1 - rounding_margin))
+return onto_ball(wide_BD, bound)
same_noise_for_other_rows: test_privacy_guards.py
    Equal numbers of other people at one step get the same noise.
-context = self._bind_context(step, positions, content)
+context = self._bind_context(step, content)
--- secure_apfed/privacy/dp_sgd.py
one_ledger_of_two: test_privacy_dp_sgd.py
    Updates of private training are played beyond the budget of the whole.
-other_ledger = self.updates if ledger is self._release_ledger else self._release_ledger
+other_ledger = self.updates
--- secure_apfed/exchange/codec.py
more_tensors_than_expected: test_exchange_codec.py
    A payload carries tensors that nobody asked for or looks at.
-if tensors.keys() != expected.keys():
+if not expected.keys() <= tensors.keys():
metadata_without_end: test_exchange_codec.py
    A peer makes a party parse metadata of any size.
-if len(payload) < tensors_start or meta_bytes > _META_LIMIT:
+if len(payload) < tensors_start:
--- secure_apfed/exchange/envelope.py
header_of_another_spelling: test_exchange_codec.py
    One header has several spellings.
-if envelope.header != header:
+if len(envelope.header) > len(header):
--- secure_apfed/exchange/links.py
frame_for_somebody_else: test_exchange_links.py
    A frame for another party is taken.
-            if claimed_origin != (self._session, sender, self.me):
+            if ends[:2] != (self._session, sender):
announcement_up_to_any_bound: test_exchange_links.py
    A peer announces, and sends, more than the receiver takes here.
-        if total > max_bytes:
+        if total > MAX_BYTES:
part_of_any_size: test_exchange_links.py
    A peer cuts a message into as many parts as it likes, empty ones without end.
-if length != min(self._part_bytes, total - offset):
+if length > min(self._part_bytes, total - offset):
--- secure_apfed/exchange/agreement.py
one_key_for_two_parties: test_exchange_agreement.py
    Two parties with one run key between them pass for two.
-for keys in (identities, run_keys):
+for keys in (identities,):
known_by_another_identity: test_exchange_agreement.py
    Anybody speaks in a party's name with an identity of its own.
-        if identity != known_identity:
+        if len(identity) != len(known_identity):
--- secure_apfed/methods/session_sum.py
charged_before_counted: test_parties_apfed.py
    A question that is refused because it was answered too often costs privacy first.
-        self.count_answer(admitted_request, digest)
-        noise_BD = None
-        if self.noise is not None:
-            noise_BD = self.noise.charge_and_draw(
-                values_BD.shape,
-                step=admitted_request.step,
-                charged_rows_B=self.pick_known_rows(admitted_request.counted_rows),
-                digest=digest,
-            )
+        noise_BD = None
+        if self.noise is not None:
+            noise_BD = self.noise.charge_and_draw(
+                values_BD.shape,
+                step=admitted_request.step,
+                charged_rows_B=self.pick_known_rows(admitted_request.counted_rows),
+                digest=digest,
+            )
+        self.count_answer(admitted_request, digest)
answer_leaves_twice: test_parties_apfed.py
    What was admitted once is answered again with other numbers.
-        self._admitted_request = None
-        values_BD
+        values_BD
one_answer_more: test_parties_apfed.py
    The active gets one answer more about each row than was agreed.
-if most_answers >= self._max_answers:
+if most_answers > self._max_answers:
step_through_the_gate_again: test_parties_apfed.py
    A passive learns from, and answers, one step twice.
-        if step <= self.last_step:
+        if step < self.last_step:
same_answer_in_every_session: test_parties_apfed.py
    Noise under a sum serves two sessions: the difference of two sums is bare of it.
-content = hashlib.blake2b(session)
+content = hashlib.blake2b()
bound_to_rows_alone: test_parties_apfed.py
    An active that sends passives different representations gets their sum.
-return StepBinding.from_contents(session, step, rows=rows, message=payload)
+return StepBinding.from_contents(session, step, rows=rows, message=rows)
refusal_not_noted: test_runs_session.py test_methods_votes.py
    Who alters sums may ask again in each resumed session.
-        except Exception:
-            self._log.append_line(
+        except GeneratorExit:
+            self._log.append_line(
--- secure_apfed/learning/release.py
row_twice_in_a_batch: test_parties_apfed.py
    A batch repeats one person, whose gradient then stands out of the sum.
-if len(set(positions)) != len(positions):
+if len(set(rows)) < minimum:
--- secure_apfed/learning/trainers.py
lambda_over_the_batch: test_methods_apfed.py
    Passives help by a B-th of what Eq. 9 says.
-return z_B.grad * (weight * len(z_B))
+return z_B.grad * weight
--- secure_apfed/methods/apfed.py
one_known_person_answered: test_methods_apfed.py
    Among strangers a single person of a passive is answered about alone.
-known_count < self.contract.minimum_batch or self.is_narrow(known_z_BD)
+self.is_narrow(known_z_BD)
--- secure_apfed/methods/apfed_code.py
another_question_answered: test_methods_code.py
    A passive answers whatever the active asks of it.
-if message.payload != _REQUEST or self._was_asked:
+if self._was_asked:
help_that_nobody_judged: test_methods_code.py
    Passives that know nothing are believed all the same.
-            if is_surely_better(held_out, local):
+            if held_out is not None:
no_help_not_reported: test_methods_code.py
    A run whose passives did not help says nothing of it.
-if student.sum_source is None:
+if student.sum_source is not None:
--- secure_apfed/networks/models.py
projections_of_any_length: test_methods_code.py
    A passive's projected rows grow with its columns, and a clip cuts most of them.
-directions / math.sqrt(features * size)
+directions / math.sqrt(numbers)
--- secure_apfed/baselines/__init__.py
own_network_teaches: test_baselines.py
    The run's own network is among the teachers that read others' numbers.
-tuple(baseline for name, baseline in BASELINES.items() if name != "network")
+tuple(BASELINES.values())
worst_local_model_chosen: test_baselines.py
    Help is compared with the worst local model, which anything is better than.
-best_first = sorted(rank_by_baseline, key=rank_by_baseline.__getitem__, reverse=True)
+best_first = sorted(rank_by_baseline, key=rank_by_baseline.__getitem__)
--- secure_apfed/settings/plugins.py
code_of_others_imported: test_plugins.py
    What a proposal or a folder names is imported, and runs with all rights.
-if only_earlier_settings or not _are_own_settings.get():
+if only_earlier_settings and not _are_own_settings.get():
--- secure_apfed/config/file.py
others_read_as_own: test_plugins.py
    A file that others wrote is read as the party's own, and may name code.
-with reading_settings(are_own=own):
+with reading_settings(are_own=True):
--- secure_apfed/learning/black_box.py
infinite_gradient_taken: test_black_box.py
    A black box's NaN is added to the sum of all passives.
-if not bool(gradient_B.isfinite().all()):
+if bool(gradient_B.isnan().all()):
--- secure_apfed/planning/forecast.py
labels_of_all_rows_counted: test_data_labels.py
    A plan promises labels of rows that have none.
-labelled_rows=labelled_rows,
+labelled_rows=teaching_rows,
teaching_rows_forgotten: test_data_labels.py
    A plan leaves out the rows without a label, which are taught, too.
-teaching_rows=teaching_rows,
+teaching_rows=labelled_rows,
--- attacks/apfed_attacks/foreign.py
luck_is_a_finding: test_attacks_foreign.py
    What luck gives, too, is reported as a leak.
-return self.score - float(np.mean(self.null))
+return self.score
--- attacks/apfed_attacks/features/unpaired_inversion.py
too_few_public_rows: test_attacks_foreign.py
    An attack without public rows crashes, where it should say what it lacks.
-if len(shadow) < 2:
+if len(shadow) < 0:
"""


def parse_faults() -> tuple[Fault, ...]:
    faults = []
    for of_file in _DIFFERENCES.split("\n--- ")[1:]:
        file, *lines = of_file.rstrip("\n").split("\n")
        heads = [at for at, line in enumerate(lines) if line[0] not in " +-"]
        for at, end in zip(heads, [*heads[1:], len(lines)], strict=True):
            name, _, tests = lines[at].partition(": ")
            right, wrong = (
                "\n".join(line[1:] for line in lines[at + 2 : end] if line[0] == sign)
                for sign in "-+"
            )
            faults.append(
                Fault(name, file, right, wrong, lines[at + 1].strip(), tuple(tests.split()))
            )
    return tuple(faults)


FAULTS = parse_faults()
