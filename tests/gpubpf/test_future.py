"""The result of work in another thread."""

from __future__ import annotations

import threading

import pytest

from gpubpf.future import Future, wait


def test_a_result_that_is_waited_for():
    future: Future[int] = Future()
    assert not future.done() and not future.wait(0)
    with pytest.raises(TimeoutError):
        future.result(0)
    thread = threading.Thread(target=future.set_result, args=(7,))
    thread.start()
    assert future.result(60) == 7
    thread.join()
    assert future.done() and future.wait(0) and future.result() == 7
    with pytest.raises(RuntimeError, match="twice"):
        future.set_result(8)


def test_an_exception():
    future: Future[int] = Future()
    error = ValueError("why")
    future.set_exception(error)
    assert future.done()
    for _ in range(2):
        with pytest.raises(ValueError) as raised:
            future.result()
        assert raised.value is error


def test_callbacks_are_called_once():
    future: Future[int] = Future()
    called: list[int] = []
    future.add_done_callback(lambda done: called.append(done.result(0)))
    assert called == []
    future.set_result(7)
    future.add_done_callback(lambda done: called.append(done.result(0) + 1))
    assert called == [7, 8]


def test_wait_for_several():
    done, never = Future[int](), Future[int]()
    done.set_result(1)
    wait([done, never, done], 0.01)  # returns although one is not done
    assert not never.done()
    threading.Timer(0.01, never.set_result, [2]).start()
    wait([done, never], 60)
    assert never.done()
