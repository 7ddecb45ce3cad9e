use super::*;
use std::cell::Cell;
use std::rc::Rc;
use std::time::{Duration, Instant};

#[test]
fn spawn_task_runs_and_is_cancelled_by_drop() {
    let ran = Rc::new(Cell::new(0));
    let counter = ran.clone();
    run(async {
        let seen = counter.clone();
        let kept = spawn(async move { seen.set(seen.get() + 1) });
        let seen = counter.clone();
        drop(spawn(async move { seen.set(seen.get() + 10) }));
        sleep_until(Instant::now() + Duration::from_millis(1)).await;
        drop(kept);
    })
    .unwrap();
    assert_eq!(ran.get(), 1);
}

#[test]
fn channel_full_waits_and_reports_a_closed_receiver() {
    run(async {
        let (sender, receiver) = channel(1);
        let feeder = spawn(async move {
            for number in 0..3 {
                sender.send(number).await.unwrap();
            }
        });
        assert_eq!(receiver.next().await, Some(0));
        assert_eq!(receiver.next().await, Some(1));
        assert_eq!(receiver.next().await, Some(2));
        assert_eq!(receiver.next().await, None);
        drop(feeder);
        let (sender, receiver) = channel(1);
        drop(receiver);
        assert_eq!(sender.send(7).await, Err(7));
    })
    .unwrap();
}

#[test]
fn channel_closed_wakes_the_sender_that_waits() {
    run(async {
        let (sender, receiver) = channel::<u8>(1);
        let dropper = spawn(async move { drop(receiver) });
        sender.closed().await;
        drop(dropper);
    })
    .unwrap();
}

#[test]
fn source_pipe_is_read_as_it_fills() {
    run(async {
        let flags = rustix::pipe::PipeFlags::NONBLOCK | rustix::pipe::PipeFlags::CLOEXEC;
        let (reader, writer) = rustix::pipe::pipe_with(flags).unwrap();
        let (reader, writer) = (Source::new(reader), Source::new(writer));
        let feeder = spawn(async move {
            for _ in 0..3 {
                writer.write_all(&[7; 100_000]).await.unwrap();
            }
        });
        let mut total = 0;
        let mut buffer = vec![0; 1 << 16];
        loop {
            match reader.read(&mut buffer).await.unwrap() {
                0 => break,
                count => total += count,
            }
        }
        assert_eq!(total, 300_000);
        drop(feeder);
    })
    .unwrap();
}

#[test]
fn either_first_wins_a_tie() {
    run(async {
        let winner = either(std::future::ready(1), std::future::ready(2)).await;
        assert!(matches!(winner, Either::First(1)));
    })
    .unwrap();
}

#[test]
fn blocking_work_lets_other_tasks_run() {
    run(async {
        let (tell, told) = std::sync::mpsc::channel();
        let other = spawn(async move { tell.send(7).unwrap() });
        // Ends only if the other task runs meanwhile.
        assert_eq!(blocking(move || told.recv().unwrap()).await.unwrap(), 7);
        drop(other);
        let hook = std::panic::take_hook();
        std::panic::set_hook(Box::new(|_| {}));
        assert!(blocking(|| panic!("on purpose")).await.is_err());
        std::panic::set_hook(hook);
    })
    .unwrap();
}
