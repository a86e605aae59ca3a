//! Which server is the primary, as sentinels say.

use std::time::Duration;

use parking_lot::Mutex;
use redis::{AsyncConnectionConfig, Client, aio::MultiplexedConnection};

use super::access::Access;

/// Asks sentinels, one after the other, until one knows.
pub(super) struct Sentinels {
    sentinels: Vec<Access>,
    /// What they call the primary and its replicas.
    service: String,
    servers: Access,
    /// Address of the primary that was connected to last.
    connected: Mutex<Option<String>>,
}

impl Sentinels {
    pub(super) fn new(sentinels: Vec<Access>, service: String, servers: Access) -> Self {
        Self { sentinels, service, servers, connected: Mutex::default() }
    }

    pub(super) fn name(&self) -> String {
        let sentinels: Vec<_> = self.sentinels.iter().map(Access::name).collect();
        format!("the primary of {} by {}", self.service, sentinels.join(", "))
    }

    /// A connection to the primary. The error is why there is none.
    pub(super) async fn connect(
        &self,
        config: &AsyncConnectionConfig,
        each: Duration,
    ) -> Result<MultiplexedConnection, String> {
        let mut reasons = Vec::new();
        for sentinel in &self.sentinels {
            let asking = self.connect_by(sentinel, config);
            match tokio::time::timeout(each, asking).await {
                Ok(Ok(connection)) => return Ok(connection),
                Ok(Err(reason)) => reasons.push(format!("{}: {reason}", sentinel.name())),
                Err(elapsed) => reasons.push(format!("{}: {elapsed}", sentinel.name())),
            }
        }
        Err(reasons.join("; "))
    }

    /// Whether the primary is another one by now than that which was connected to last. `false` where nobody knows.
    pub(super) async fn has_successor(&self, config: &AsyncConnectionConfig, each: Duration) -> bool {
        let Some(connected) = self.connected.lock().clone() else { return false };
        for sentinel in &self.sentinels {
            let Ok(client) = sentinel.first() else { continue };
            if let Ok(Ok(primary)) = tokio::time::timeout(each, self.ask(&client, config)).await {
                return address(&primary) != connected;
            }
        }
        false
    }

    async fn connect_by(
        &self,
        sentinel: &Access,
        config: &AsyncConnectionConfig,
    ) -> Result<MultiplexedConnection, String> {
        let failed = |error: redis::RedisError| error.to_string();
        let primary = self.ask(&sentinel.first().map_err(failed)?, config).await?;
        let mut connection = primary.get_multiplexed_async_connection_with_config(config).await.map_err(failed)?;
        // A sentinel that was cut off goes on naming the primary that was.
        let role = redis::cmd("ROLE").query_async::<Vec<redis::Value>>(&mut connection).await;
        match role.as_deref() {
            Ok([redis::Value::BulkString(role), ..]) if role != b"master" => {
                Err(format!("{} is no primary any more", address(&primary)))
            }
            // This user may not ask: a write will tell.
            Ok(_) | Err(_) => {
                *self.connected.lock() = Some(address(&primary));
                Ok(connection)
            }
        }
    }

    async fn ask(&self, sentinel: &Client, config: &AsyncConnectionConfig) -> Result<Client, String> {
        let failed = |error: redis::RedisError| error.to_string();
        let mut connection = sentinel.get_multiplexed_async_connection_with_config(config).await.map_err(failed)?;
        let mut question = redis::cmd("SENTINEL");
        question.arg("GET-MASTER-ADDR-BY-NAME").arg(&self.service);
        let address: Option<(String, u16)> = question.query_async(&mut connection).await.map_err(failed)?;
        let (host, port) = address.ok_or_else(|| format!("knows no service {:?}", self.service))?;
        self.servers.client(&host, port).map_err(failed)
    }
}

fn address(server: &Client) -> String {
    server.get_connection_info().addr().to_string()
}
