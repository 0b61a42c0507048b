"""Worker: one thread while there is work; newer tasks replace waiting ones of their name."""

import threading

from harmony_lab.notebook.worker import Worker


def fail(error: Exception) -> None:
    raise AssertionError(f"no error was expected: {error!r}")


def test_of_many_moves_while_busy_only_the_last_runs():
    worker = Worker("test", fail)
    busy, go_on = threading.Event(), threading.Event()
    ran: list[int] = []

    def first() -> None:
        busy.set()
        go_on.wait(10)
        ran.append(0)

    worker.submit("move", first)
    busy.wait(10)
    for number in range(1, 6):
        worker.submit("move", lambda number=number: ran.append(number))
    go_on.set()
    assert worker.wait_idle(10)
    assert ran == [0, 5]


def test_tasks_of_other_names_keep_their_order():
    worker = Worker("test", fail)
    busy, go_on = threading.Event(), threading.Event()
    ran: list[str] = []
    worker.submit("hold", lambda: (busy.set(), go_on.wait(10)))
    busy.wait(10)
    for name in "abca":
        worker.submit(name, lambda name=name: ran.append(name))
    go_on.set()
    assert worker.wait_idle(10)
    assert ran == ["a", "b", "c"]


def test_a_failing_task_is_reported_and_the_next_one_runs():
    errors: list[Exception] = []
    ran: list[str] = []
    worker = Worker("test", errors.append)
    worker.submit("bad", lambda: 1 / 0)
    worker.submit("good", lambda: ran.append("good"))
    assert worker.wait_idle(10)
    assert [type(error) for error in errors] == [ZeroDivisionError]
    assert ran == ["good"]


def test_no_thread_is_left_when_idle_and_none_starts_once_closed():
    worker = Worker("harmony worker under test", fail)
    worker.submit("task", lambda: None)
    assert worker.wait_idle(10)
    worker.close()
    ran: list[str] = []
    worker.submit("late", lambda: ran.append("late"))
    assert worker.wait_idle(10)
    assert ran == []
    assert "harmony worker under test" not in [thread.name for thread in threading.enumerate()]


def test_closing_drops_what_waits():
    worker = Worker("test", fail)
    busy, go_on = threading.Event(), threading.Event()
    ran: list[str] = []
    worker.submit("hold", lambda: (busy.set(), go_on.wait(10)))
    busy.wait(10)
    worker.submit("dropped", lambda: ran.append("dropped"))
    worker.close()
    go_on.set()
    assert worker.wait_idle(10)
    assert ran == []


def test_a_delayed_task_is_replaced_while_it_waits():
    worker = Worker("test", fail, delay_s=0.2)
    ran: list[int] = []
    for number in range(3):
        worker.submit("weigh", lambda number=number: ran.append(number))
    assert worker.wait_idle(10)
    assert ran == [2]


def test_closing_ends_the_delay():
    worker = Worker("test", fail, delay_s=60)
    ran: list[int] = []
    worker.submit("weigh", lambda: ran.append(1))
    worker.close()
    assert worker.wait_idle(10)
    assert ran == []
