"""Step numbers of verl's batches: a batch has the same number after a restart of the trainer."""

from rollout_backend.verl.async_batches import StepNumbers


def play(resumes, *batches):
    numbers = StepNumbers(resumes)
    return [numbers.next(step, validate) for step, validate in batches]


def test_no_two_batches_of_one_process_have_the_same_number():
    batches = [(1, False), (1, False), (1, True), (2, False), (2, True), (2, False), (0, True)]
    numbers = [number for number, _ in play(True, *batches)]
    assert len(set(numbers)) == len(batches)


def test_a_batch_has_the_same_number_after_a_restart():
    long = dict(zip([(1, 0), (2, 0), (3, 0)], play(True, (1, False), (2, False), (3, False)), strict=True))
    [(again, _)] = play(True, (3, False))
    assert again == long[3, 0][0]


def test_only_the_first_step_after_a_checkpoint_was_sampled_with_the_same_weights():
    numbers = play(True, (4, True), (5, False), (5, False), (5, True), (6, False))
    assert [same for _, same in numbers] == [True, True, True, False, False]


def test_a_training_that_does_not_resume_reuses_nothing():
    assert [same for _, same in play(False, (1, False), (1, True))] == [False, False]
