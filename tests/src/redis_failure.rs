//! What a Redis may do instead of answering, one failure at a time, brought about in a real server.

use limiter_user::store::redis::ACL_RULES;

use crate::{chaos_proxy::ChaosProxy, redis_server::RedisServer};

/// A user with the rights of the documentation.
const USER: (&str, &str) = ("limiter", "pw");

/// What is done to the server by somebody else.
#[derive(Clone, Copy, Debug)]
enum Act {
    Run(&'static [&'static str]),
    /// With the password of the default user.
    RunAs(&'static str, &'static [&'static str]),
    /// Keeps the server busy until it is told to stop.
    LoopFor(&'static str),
    Kill,
    RestartEmpty,
    Freeze,
    Thaw,
    /// Replies arrive in part, and then the connection ends.
    CutReplies,
    CutNothing,
}

#[derive(Debug)]
pub struct Failure {
    pub name: &'static str,
    /// Whether the nodes have a name and a password; else they are the server's default user.
    has_user: bool,
    begin: &'static [Act],
    end: &'static [Act],
    /// Whether the nodes say that they share nothing, and in which words.
    pub says: Option<&'static str>,
}

pub const FAILURES: &[Failure] = &[
    Failure { name: "NOSCRIPT", has_user: true, begin: &[Act::Run(&["SCRIPT", "FLUSH"])], end: &[], says: None },
    Failure {
        name: "cut off",
        has_user: true,
        begin: &[Act::Run(&["CLIENT", "KILL", "USER", "limiter"])],
        end: &[],
        says: None,
    },
    Failure { name: "flushed", has_user: true, begin: &[Act::Run(&["FLUSHALL"])], end: &[], says: None },
    Failure {
        name: "WRONGPASS",
        has_user: true,
        begin: &[
            Act::Run(&["ACL", "SETUSER", "limiter", "resetpass", ">other"]),
            Act::Run(&["CLIENT", "KILL", "USER", "limiter"]),
        ],
        end: &[Act::Run(&["ACL", "SETUSER", "limiter", "resetpass", ">pw"])],
        says: Some("authentication failed"),
    },
    Failure {
        name: "NOPERM",
        has_user: true,
        begin: &[Act::Run(&["ACL", "SETUSER", "limiter", "-evalsha"])],
        end: &[Act::Run(&["ACL", "SETUSER", "limiter", "+evalsha"])],
        says: Some("permission"),
    },
    Failure {
        name: "OOM",
        has_user: true,
        begin: &[Act::Run(&["CONFIG", "SET", "maxmemory", "1"])],
        end: &[Act::Run(&["CONFIG", "SET", "maxmemory", "0"])],
        says: Some("OOM"),
    },
    Failure {
        name: "READONLY",
        has_user: true,
        begin: &[Act::Run(&["REPLICAOF", "127.0.0.1", "1"])],
        end: &[Act::Run(&["REPLICAOF", "NO", "ONE"])],
        says: Some("read only replica"),
    },
    Failure {
        name: "NOREPLICAS",
        has_user: true,
        begin: &[Act::Run(&["CONFIG", "SET", "min-replicas-to-write", "1"])],
        end: &[Act::Run(&["CONFIG", "SET", "min-replicas-to-write", "0"])],
        says: Some("NOREPLICAS"),
    },
    Failure {
        name: "BUSY",
        has_user: true,
        begin: &[Act::Run(&["CONFIG", "SET", "busy-reply-threshold", "1"]), Act::LoopFor("while true do end")],
        end: &[Act::Run(&["SCRIPT", "KILL"])],
        says: Some("BUSY"),
    },
    Failure {
        name: "LOADING",
        has_user: true,
        begin: &[
            Act::Run(&["DEBUG", "POPULATE", "3000"]),
            Act::Run(&["CONFIG", "SET", "loading-process-events-interval-bytes", "1024"]),
            Act::Run(&["CONFIG", "SET", "key-load-delay", "1000"]),
            Act::LoopFor("DEBUG RELOAD"),
        ],
        end: &[],
        says: Some("loading the dataset"),
    },
    Failure {
        name: "MASTERDOWN",
        has_user: true,
        begin: &[
            Act::Run(&["CONFIG", "SET", "replica-serve-stale-data", "no"]),
            Act::Run(&["REPLICAOF", "127.0.0.1", "1"]),
        ],
        end: &[Act::Run(&["REPLICAOF", "NO", "ONE"])],
        says: Some("MASTER is down"),
    },
    Failure {
        name: "NOAUTH",
        has_user: false,
        begin: &[
            Act::Run(&["CONFIG", "SET", "requirepass", "secret"]),
            Act::RunAs("secret", &["CLIENT", "KILL", "USER", "default"]),
        ],
        end: &[Act::RunAs("secret", &["CONFIG", "SET", "requirepass", ""])],
        says: Some("Authentication required"),
    },
    Failure {
        name: "reset mid-reply",
        has_user: true,
        begin: &[Act::CutReplies],
        end: &[Act::CutNothing],
        says: Some(""),
    },
    Failure { name: "timeout", has_user: true, begin: &[Act::Freeze], end: &[Act::Thaw], says: Some("no answer") },
    Failure { name: "refused", has_user: true, begin: &[Act::Kill], end: &[Act::RestartEmpty], says: Some("refused") },
];

impl Failure {
    /// Whether the server has nothing any more afterwards.
    pub fn loses_data(&self) -> bool {
        self.end.iter().any(|act| matches!(act, Act::RestartEmpty))
    }

    /// Name and password of the nodes' user.
    pub fn user(&self) -> Option<(&'static str, &'static str)> {
        self.has_user.then_some(USER)
    }
}

/// A server, and the way to it.
#[derive(Debug)]
pub struct FailingRedis {
    pub server: RedisServer,
    proxy: ChaosProxy,
}

impl FailingRedis {
    pub async fn start() -> Self {
        let server = RedisServer::start().await;
        add_user(&server).await;
        let proxy = ChaosProxy::start_calm(server.port()).await;
        Self { server, proxy }
    }

    /// Where the nodes of a test of this failure find it.
    pub fn url(&self, failure: &Failure) -> String {
        let is_cut = failure.begin.iter().any(|act| matches!(act, Act::CutReplies));
        if is_cut { self.proxy.url() } else { self.server.url() }
    }

    pub async fn begin(&mut self, failure: &Failure) {
        for step in failure.begin {
            self.act(*step).await;
        }
    }

    pub async fn end(&mut self, failure: &Failure) {
        for step in failure.end {
            self.act(*step).await;
        }
    }

    async fn act(&mut self, act: Act) {
        let Self { server, proxy } = self;
        match act {
            Act::Run(words) => {
                // While it loads or is busy, it takes few commands, and says so.
                let () = server.try_run(words).await.unwrap_or_default();
            }
            Act::LoopFor(what) => {
                let client = redis::Client::open(server.url()).expect("a valid address");
                tokio::spawn(async move {
                    let mut connection = client.get_multiplexed_async_connection().await.expect("a connection");
                    let mut command = match what.split_once(' ') {
                        Some(("DEBUG", rest)) => redis::cmd("DEBUG").arg(rest).to_owned(),
                        _ => redis::cmd("EVAL").arg(what).arg(0).to_owned(),
                    };
                    let result: redis::RedisResult<redis::Value> = command.query_async(&mut connection).await;
                    drop((result, &mut command));
                });
            }
            Act::RunAs(password, words) => server.run_as(password, words).await,
            Act::CutReplies => proxy.cut_replies(),
            Act::CutNothing => proxy.calm_down(),
            Act::Kill => server.kill(),
            Act::RestartEmpty => {
                server.restart().await;
                add_user(server).await;
            }
            Act::Freeze => server.freeze(),
            Act::Thaw => server.thaw(),
        }
    }
}

async fn add_user(server: &RedisServer) {
    let (name, password) = USER;
    server.set_user(name, password, ACL_RULES).await;
}
