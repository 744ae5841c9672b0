// The scenario agent of `covenant prove`, for the JavaScript SDK: `node a2a_js.mjs PORT memory|SQLITE-FILE`.

import { appendFileSync } from 'node:fs';
import { setTimeout as sleep } from 'node:timers/promises';
import express from 'express';
import { TaskState } from '@a2a-js/sdk';
import {
  AgentEvent, DefaultPushNotificationSender, DefaultRequestHandler, InMemoryPushNotificationStore, InMemoryTaskStore,
} from '@a2a-js/sdk/server';
import { agentCardHandler, jsonRpcHandler, restHandler, UserBuilder } from '@a2a-js/sdk/server/express';

const [port, where] = process.argv.slice(2);
const url = `http://127.0.0.1:${port}`;
const canceled = new Set();

class Scenario {
  async execute(context, bus) {
    const { taskId, contextId, task, userMessage } = context;
    const [verb, key, ...rest] = userMessage.parts[0].content.value.split(' ');
    const [count = 0, pause = 0, size = 0] = rest.map(Number);
    appendFileSync(process.env.PROVE_RUNS, `${key}\n`);
    const now = () => new Date().toISOString();
    const tell = (state) => bus.publish(AgentEvent.statusUpdate({ taskId, contextId, status: { state, timestamp: now() } }));
    const say = (text, append) => bus.publish(AgentEvent.artifactUpdate({
      taskId, contextId, append, lastChunk: false,
      artifact: { artifactId: 'text', parts: [{ content: { $case: 'text', value: text } }] },
    }));
    if (!task) {
      const status = { state: TaskState.TASK_STATE_SUBMITTED, timestamp: now() };
      bus.publish(AgentEvent.task({ id: taskId, contextId, status, artifacts: [], history: [userMessage] }));
    }
    tell(TaskState.TASK_STATE_WORKING);
    if (verb === 'stream') {
      for (let number = 0; number < count; number += 1) {
        say(`${number} `.padEnd(size), number > 0);
        await sleep(pause);
      }
    } else if (verb === 'run') {
      for (let waited = 0; waited < count && !canceled.has(taskId); waited += 50) await sleep(50);
    }
    if (canceled.has(taskId)) tell(TaskState.TASK_STATE_CANCELED);
    else if (verb === 'ask') tell(TaskState.TASK_STATE_INPUT_REQUIRED);
    else if (verb === 'fail') tell(TaskState.TASK_STATE_FAILED);
    else {
      if (verb !== 'stream') say(`${key} done`, false);
      tell(TaskState.TASK_STATE_COMPLETED);
    }
    bus.finished();
  }

  async cancelTask(taskId) {
    canceled.add(taskId);
  }
}

async function stores() {
  if (where === 'memory') return [new InMemoryTaskStore(), new InMemoryPushNotificationStore()];
  const { DatabasePushNotificationStore, DatabaseTaskStore } = await import('@a2a-js/sdk/server/database');
  const { Kysely, SqliteDialect } = await import('kysely');
  const { default: Database } = await import('better-sqlite3');
  const db = new Kysely({ dialect: new SqliteDialect({ database: new Database(where) }) });
  return [new DatabaseTaskStore(db), new DatabasePushNotificationStore(db)];
}

const agentCard = {
  name: 'prove', description: 'Does what the durability kit asks', version: '1', skills: [],
  capabilities: { streaming: true, pushNotifications: true, extensions: [] },
  defaultInputModes: ['text/plain'], defaultOutputModes: ['text/plain'],
  supportedInterfaces: [
    { url: `${url}/rpc`, protocolBinding: 'JSONRPC', protocolVersion: '1.0' },
    { url: `${url}/rpc`, protocolBinding: 'JSONRPC', protocolVersion: '0.3' },
    { url: `${url}/rest`, protocolBinding: 'HTTP+JSON', protocolVersion: '1.0' },
  ],
};
const [tasks, pushes] = await stores();
const requestHandler = new DefaultRequestHandler(
  agentCard, tasks, new Scenario(), undefined, pushes, new DefaultPushNotificationSender(pushes),
);
const served = { requestHandler, userBuilder: UserBuilder.noAuthentication, legacyCompat: { enabled: true } };
const app = express();
app.use('/.well-known/agent-card.json', agentCardHandler({ agentCardProvider: requestHandler }));
app.use('/rpc', jsonRpcHandler(served));
app.use('/rest', restHandler({ ...served, legacyCompat: undefined }));
app.listen(Number(port), '127.0.0.1');
