"""Work beside the loop: in order, its errors told, nothing after a failure."""

import threading

import pytest

from model_runtime.background import BackgroundWriter


@pytest.fixture
def writer():
    one = BackgroundWriter("test")
    yield one
    one.close()


def finish(writer):
    writer.finish(sign_of_life=lambda: None, every_s=1)


def test_jobs_run_in_order_beside_the_loop_and_are_told_of_on_its_thread(writer):
    go, done = threading.Event(), []
    for number in range(5):
        writer.submit(lambda n=number: (go.wait(10), n)[1], lambda n: done.append((n, threading.get_ident())))
    writer.settle()
    assert done == []
    go.set()
    finish(writer)
    assert done == [(n, threading.get_ident()) for n in range(5)]


def test_after_a_failure_nothing_more_is_written_and_the_loop_learns_why(writer):
    written = []
    writer.submit(lambda: written.append(1), lambda _: None)
    writer.submit(lambda: 1 / 0, lambda _: written.append("told"))
    writer.submit(lambda: written.append(3), lambda _: None)
    with pytest.raises(ZeroDivisionError):
        finish(writer)
    assert written == [1]


def test_waiting_for_a_slow_write_gives_signs_of_life(writer):
    go, signs = threading.Event(), []

    def sign():
        signs.append(1)
        if len(signs) == 3:
            go.set()

    writer.submit(lambda: go.wait(10), lambda _: None)
    writer.finish(sign_of_life=sign, every_s=0.01)
    assert len(signs) >= 3
